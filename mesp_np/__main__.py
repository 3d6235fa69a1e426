"""python -m mesp_np"""

import sys

from mesp_np.cli import main

if __name__ == "__main__":
    sys.exit(main())
