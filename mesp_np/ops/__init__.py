"""One file an operation: derivation, forward, backward, kernels.

Every public function takes the team first, then outputs, then inputs, then sizes.
It checks shapes (in a plan too, so planning is also shape checking) and then calls
kernels: scalar loops over a row range that allocate nothing and write only to their
outputs.  Ops never see the arena: they get arrays.
"""

import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

if not re.fullmatch("0*[1-9][0-9]*", os.environ.get("NUMBA_NUM_THREADS", "1")):
    del os.environ["NUMBA_NUM_THREADS"]     # not even an import survives a 0; the team's threads are none of Numba's

import numba

HERE = Path(__file__).parent
kernel = numba.njit(cache=True, nogil=True, error_model="numpy")     # x / 0 is inf: no test in every loop


class ShapeError(ValueError):
    """An op was given arrays whose shapes do not fit together."""


def expect(shape, **arrays):
    """Raise ShapeError unless every named array (None is skipped) has this shape."""
    for name, array in arrays.items():
        if array is not None and array.shape != tuple(shape):
            raise ShapeError(f"{name} has shape {array.shape}, expected {tuple(shape)}")


BASES = HERE / "__pycache__", Path.home() / ".cache" / "mesp_np"


def cache_folder(bases=BASES):
    """Where compiled kernels are kept, named by a hash of all the ops.

    Numba looks only at the file a kernel stands in: after an edit to a function that it calls
    from another file, it would go on with the old code.  Where no base can be written to,
    kernels are kept for this process alone.
    """
    sources = b"".join(path.read_bytes() for path in sorted(HERE.glob("*.py")))
    name = "kernels-" + hashlib.sha256(sources).hexdigest()[:16]
    for base in bases:
        try:
            fresh = not (base / name).exists()
            (base / name).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=base / name).close()
        except OSError:
            continue
        for old in base.glob("kernels-*") if fresh else ():
            if old.name != name:
                shutil.rmtree(old, ignore_errors=True)
        return str(base / name)
    return tempfile.mkdtemp(prefix="mesp_np-")


numba.config.CACHE_DIR = numba.config.CACHE_DIR or cache_folder()
