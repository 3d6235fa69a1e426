"""python -m mesp_np, and the command mesp-np.

The imports take a second, in which Ctrl-C is to end as quietly as later: so they stand inside.
"""

import sys


def main():
    """The exit code of the command that the command line names."""
    try:
        from mesp_np import cli
        return cli.main()
    except KeyboardInterrupt:
        print("mesp-np: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
