"""One file an operation: derivation, forward, backward, kernels.

Every function that computes takes the team first, then outputs, then inputs, then sizes.
It checks shapes (in a plan too, so planning is also shape checking) and then calls
kernels: scalar loops over a row range that allocate nothing and write only to their
outputs.  (`matmul.py`'s work on tiles, in the CPU's vectors, with a worker's scratch.)
Ops never see the arena: they get arrays.

A kernel is compiled when it first runs, and not before then is Numba imported
(`compiling.py`): a plan, which runs none, starts without it.
"""

import hashlib
import os
import re
from functools import update_wrapper
from pathlib import Path

HERE = Path(__file__).parent

if not re.fullmatch("0*[1-9][0-9]*", os.environ.get("NUMBA_NUM_THREADS", "1")):
    del os.environ["NUMBA_NUM_THREADS"]     # not even an import survives a 0; the team's threads are none of Numba's


def digest(folder=HERE):
    """A hash of the ops as they are written now."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))).hexdigest()[:16]


LOADED = digest()       # before any of them is imported: what is edited later is not what this process runs


class kernel:
    """A decorator: the function, compiled for the types of its arguments when it is called with them.

    function  as it is written
    compiled  Numba's dispatcher of it; None before the first call
    inline    is it made part of whatever kernel calls it, however long it is?
    """

    inline = False

    def __init__(self, function):
        update_wrapper(self, function)
        self.function, self.compiled = function, None

    def __call__(self, *args):
        if self.compiled is None:
            from mesp_np.ops.compiling import dispatcher
            dispatcher(self)
        return self.compiled(*args)


class inlined(kernel):
    """A kernel for the innermost loops of others: only what has no call in it is done in vectors."""

    inline = True


@kernel
def _nothing():
    pass


def load_compiler():
    """Have Numba in memory, and what it loads with its first kernel, for whoever measures memory afterwards."""
    _nothing()


class ShapeError(ValueError):
    """An op was given arrays whose shapes do not fit together."""


def expect(shape, **arrays):
    """Raise ShapeError unless every named array (None is skipped) has this shape."""
    for name, array in arrays.items():
        if array is not None and array.shape != tuple(shape):
            raise ShapeError(f"{name} has shape {array.shape}, expected {tuple(shape)}")
