"""How kernels are compiled, kept on disk, and counted.

Numba takes half a second and 60 MB to import, so `ops.kernel` imports this when a kernel first runs.  (`tiles.py` and
the files it stands on write code for Numba, and are imported as late.)

Numba keeps what it has compiled, but looks only at the file that a kernel stands in: after an
edit to a function that it calls from another file, it would go on with the old code.  So the
folder is named by a hash of all the ops.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import numba
from numba.core import event as numba_event
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import typeof_impl

from mesp_np import ops

HOME = os.path.expanduser("~")                   # as it stands for a user without one
BASES = (ops.HERE / "__pycache__",) + ((Path(HOME, ".cache", "mesp_np"),) if HOME != "~" else ())


def cache_folder(digest=ops.LOADED, bases=BASES):
    """The folder for kernels compiled from these sources, in the first base that can be written to.

    Older ones beside a new one are removed.  Without a folder, None, and a line on standard error says so.
    """
    name = f"kernels-{digest}"
    for base in bases:
        try:
            fresh = not (base / name).exists()
            (base / name).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=base / name).close()
        except OSError:
            continue
        for old in base.iterdir() if fresh else ():
            if old.name != name and re.fullmatch(f"kernels-[0-9a-f]{{{len(digest)}}}", old.name):      # ours
                shutil.rmtree(old, ignore_errors=True)
        return str(base / name)
    _not_kept(f"{' and '.join(map(str, bases))} cannot be written to")
    return None


def dispatcher(kernel):
    """Numba's dispatcher of an `ops.kernel`, made once."""
    with global_compiler_lock:                                          # workers may come at the same time
        if kernel.compiled is None:
            compiled = numba.njit(nogil=True, error_model="numpy",      # x / 0 is inf: no test in every loop
                                  forceinline=kernel.inline)
            made = compiled(kernel.function)
            if numba.config.CACHE_DIR:
                made._cache = Cache(kernel.function)
            kernel.compiled = made
        return kernel.compiled


@typeof_impl.register(ops.kernel)
def _(kernel, context):
    """Within a kernel, another one is its dispatcher."""
    return typeof_impl(dispatcher(kernel), context)


class Cache(FunctionCache):
    """Numba's, except that a disk that is full ends no run."""

    def save_overload(self, signature, data):
        """Keep a compiled kernel, if that can be."""
        try:
            super().save_overload(signature, data)
        except OSError as error:
            _not_kept(error.strerror)
            self.disable()


@cache
def _not_kept(reason):
    """Say once why compiled kernels are not kept."""
    print(f"mesp-np: compiled kernels are not kept ({reason}); the next run compiles them again, unless "
          "NUMBA_CACHE_DIR names a folder with room", file=sys.stderr)


class Kernels(numba_event.Listener):
    """Counts the kernels that Numba compiles; what a kernel calls is part of it, and a cached one is not compiled.

    began  called at the first
    """

    def __init__(self, began):
        self.count = 0
        self.seconds = 0.0
        self._began = began
        self._started = []                       # time.perf_counter of each being compiled, the outermost first

    @property
    def active(self):
        """Has Numba begun to compile?"""
        return bool(self.count or self._started)

    def listening(self):
        """A `with` block in which kernels are counted."""
        return numba_event.install_listener("numba:compile", self)

    def on_start(self, event):
        """Numba begins with one."""
        if not self.active:
            self._began()
        self._started.append(time.perf_counter())

    def on_end(self, event):
        """Numba is done with one."""
        started = self._started.pop()
        if not self._started:
            self.count += 1
            self.seconds += time.perf_counter() - started


chosen = numba.config.CACHE_DIR                 # by who set NUMBA_CACHE_DIR
numba.config.CACHE_DIR = cache_folder(bases=[Path(chosen)] if chosen else BASES) or ""
