"""Where the inputs of blocks wait for the backward.

    ram    as they are, in the arena: 4 N D bytes a layer
    bf16   in the arena, rounded to bfloat16: half of that.  The replay then starts from other numbers
           than the forward had, so the gradient is no longer exact (`compare` measures by how much)
    disk   in a temporary file, one slot a layer.  Its pages belong to the system's cache, not to
           this process, and the system is told that they are not needed soon.  (Where the folder
           for temporary files is itself in memory, as a tmpfs is, nothing is saved by that.)
           What a run needs of it is reserved before the first step.

`put(index, x)` takes an input over and returns the function that gives it back.
"""

import errno
import os
import tempfile
from contextlib import contextmanager, suppress

import numpy as np

from mesp_np.errors import UserError
from mesp_np.ops import rounding
from mesp_np.params import put


def in_memory(x):
    """The function that gives x back."""
    return lambda: x


class InMemory:
    """Inputs stay where they are."""

    def __init__(self, arena, team):
        self.arena, self.team = arena, team

    def put(self, index, x):
        return in_memory(x)

    def reserve(self, size):
        """Have room outside the arena for so many bytes of inputs.  Raises UserError where there is none."""

    def close(self):
        """Let go of what is outside the arena."""


class Rounded(InMemory):
    """Inputs are kept as bfloat16."""

    def put(self, index, x):
        half = self.arena.alloc(f"layer.{index}.x.bf16", x.shape, np.uint16, "checkpoint")
        rounding.forward(self.team, half, x)
        self.arena.free(x)
        return lambda: self._take(index, half)

    def _take(self, index, half):
        x = self.arena.alloc(f"layer.{index}.x", half.shape, category="checkpoint")
        put(self.team, x, lambda: half)
        self.arena.free(half)
        return x


class OnDisk(InMemory):
    """Inputs are written to a file without a name, which is gone with the process."""

    def __init__(self, arena, team):
        super().__init__(arena, team)
        self.file = None

    def put(self, index, x):
        self.team.run(x, 1, lambda *_: self._write(index, x), flops=0)
        self.arena.free(x)
        return lambda: self._take(index, x.shape)

    def reserve(self, size):
        with self._told_of(size, "kept"):
            self._open()
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file.fileno(), 0, size)

    def close(self):
        if self.file:
            self.file.close()

    def _open(self):
        self.file = self.file or tempfile.TemporaryFile()

    def _take(self, index, shape):
        x = self.arena.alloc(f"layer.{index}.x", shape, category="checkpoint")
        self.team.run(x, 1, lambda *_: self._read(index, x), flops=0)
        return x

    def _write(self, index, x):
        with self._told_of(x.nbytes, "written"):
            self._open()
            self.file.seek(index * x.nbytes)
            self.file.write(x)
            self.file.flush()
        self._drop_pages(index, x)

    def _read(self, index, x):
        with self._told_of(x.nbytes, "read again"):
            self.file.seek(index * x.nbytes)
            if self.file.readinto(x) != x.nbytes:
                raise OSError(errno.EIO, "the file has become shorter")
        self._drop_pages(index, x)

    @contextmanager
    def _told_of(self, size, what):
        try:
            yield
        except OSError as error:
            raise UserError(f"--checkpoint-store disk: {size:,} B in a temporary file cannot be {what} "
                            f"({error.strerror or error})", "free space, or set TMPDIR to another folder") from None

    def _drop_pages(self, index, x):
        with suppress(AttributeError, OSError):          # advice that only some systems take
            os.posix_fadvise(self.file.fileno(), index * x.nbytes, x.nbytes, os.POSIX_FADV_DONTNEED)


STORES = {"ram": InMemory, "bf16": Rounded, "disk": OnDisk}
