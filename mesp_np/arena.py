"""The arena: every tensor of a step lives here, and every byte is on record.

Five verbs: alloc, free, temp, scope, rename.  Two more say who frees a tensor that outlives
its scope (result, detach), and one says which stage of the step it is (stage).  A free list
says where a tensor goes (`freelist.py`), or a schedule, in a part of the work whose requests
are known beforehand (rehearse, follow; `placement.py`).

    with arena.scope("layer.3"):
        gate = arena.alloc("gate", (N, F))           # (N, F)
        with arena.temp("h", (N, R)) as h:           # (N, R)  scratch
            ...
        arena.free(gate)

An arena is real or phantom.  A real one is a single piece of fresh anonymous
memory of a stated capacity.  A phantom one hands out arrays of the right shape,
dtype and nbytes with no memory behind them: one poisoned element, read-only,
broadcast with zero strides.  The same code runs on both, so the event list of a
phantom run *is* the plan of the real one.  Nothing asks which of the two it has;
work is skipped where an output is not writeable (`team.py`).
"""

import math
import mmap
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mesp_np.freelist import FreeList
from mesp_np.ledger import Ledger, show_bytes
from mesp_np.placement import Follower, OffPlan, Recorder

PACKAGE = str(Path(__file__).parent)
PLUMBING = tuple(str(Path(PACKAGE, name)) for name in ("arena.py", "saved.py"))


class ArenaError(Exception):
    """A tensor was used against the rules of the arena."""


class ArenaFull(ArenaError, MemoryError):
    """The next tensor does not fit; the message lists what is live, largest first."""


class ArenaLeak(ArenaError):
    """A scope ended with a tensor that nobody freed, kept or declared a result."""


@dataclass(slots=True)
class _Block:
    """What the arena knows of one live array."""

    array: np.ndarray        # held, so that its id() stays its own
    name: str
    category: str
    offset: int
    source: str
    scope: object            # the scope that must see it freed; None: a longer-lived owner


class Arena:
    """Allocator with a ledger.

    capacity  bytes of real memory, or None for a phantom arena
    dtype     of tensors whose alloc names none
    poison    fill memory with 0xFF on alloc and after free (NaN, or -1), so that an
              uninitialised read or a use after free cannot pass unnoticed
    """

    def __init__(self, capacity=None, dtype=np.float32, poison=False):
        self.dtype = np.dtype(dtype)
        self.capacity = capacity
        self.ledger = Ledger()
        self._poison = poison
        self._list = FreeList()
        self._places = self._list                # for a while a Recorder or a Follower
        self._blocks = {}                        # id(array) -> _Block
        self._names = set()
        self._scopes = []
        self._memory = None if capacity is None else _fresh_memory(capacity)

    @property
    def extent(self):
        """The highest offset ever used, in bytes."""
        return self._list.extent

    def alloc(self, name, shape, dtype=None, category="temp"):
        """A new C-contiguous array, uninitialised, named within the open scopes.

        Raises ArenaFull when it does not fit, ArenaError when the name is taken or the schedule has another tensor.
        """
        name = self._full_name(name)
        if name in self._names:
            raise ArenaError(f"{name} is allocated twice")
        dtype = np.dtype(dtype or self.dtype)
        size = dtype.itemsize * math.prod(shape)
        offset = self._place(name, self._places.alloc, size)
        array = self._array(offset, size, tuple(shape), dtype, name)
        scope = self._scopes[-1] if self._scopes else None
        self._blocks[id(array)] = _Block(array, name, category, offset, _caller(), scope)
        self._names.add(name)
        self._record("alloc", self._blocks[id(array)])
        return array

    def free(self, array):
        """Give back an array that `alloc` returned (not a view of it)."""
        block = self._block(array)
        del self._blocks[id(array)]
        self._names.remove(block.name)
        if self._poison:
            self._fill(block.offset, array.nbytes)
        self._place(block.name, self._places.free, block.offset)
        self._record("free", block)

    def rename(self, array, name, category=None):
        """Say that an array now holds something else: an op wrote over its input."""
        block = self._block(array)
        was, new = block.name, self._full_name(name)
        if new != was and new in self._names:
            raise ArenaError(f"{was} cannot be renamed {new}: that name is taken")
        self._names.remove(was)
        self._names.add(new)
        block.name = new
        block.category = category or block.category
        block.source = _caller()
        self._record("rename", block, was)
        return array

    @contextmanager
    def temp(self, name, shape, dtype=None, category="temp"):
        """An array for the length of a `with` block."""
        array = self.alloc(name, shape, dtype, category)
        yield array
        self.free(array)

    @contextmanager
    def scope(self, name):
        """Prefix names with `name.`, and at the end check that nothing leaked.

        Whatever was allocated inside must have been freed or handed to a longer-lived
        owner with `result`.  Raises ArenaLeak with name, bytes and source line.
        """
        self._scopes.append(_Scope(name))
        yield
        scope = self._scopes.pop()
        for block in self._blocks.values():
            if block.scope is scope:
                raise self.leak(block.array, f"is still live at the end of scope {scope.name}")

    @contextmanager
    def rehearse(self, part):
        """Place the tensors of a part of the work when all of it is known; yields the Recorder with its schedule.

        For a phantom: its tensors get their offsets, in the ledger, at the end.
        """
        first = len(self.ledger.events)
        with self._placing(part, Recorder()) as recorder:
            yield recorder
        base = self._list.alloc(recorder.schedule.extent)
        self._list.free(base)
        self.ledger.place(first, base + recorder.schedule.offsets)

    @contextmanager
    def follow(self, part, schedule):
        """Place the tensors of a part of the work where a Schedule has them, in one block of the free list.

        Raises ArenaFull before it begins, ArenaError at an alloc or free that is not the schedule's next.
        """
        base = self._list.alloc(schedule.extent)
        self._expect_room(part, base, schedule.extent)
        with self._placing(part, Follower(schedule, base)):
            yield
        self._list.free(base)

    @contextmanager
    def _placing(self, part, places):
        """`places` in the free list's place, for a part that leaves live what it found.

        Raises ArenaLeak when more is live at its end, ArenaError when less is.
        """
        found, self._places = set(self._names), places
        yield places
        self._places = self._list
        self._expect_only(found, part)
        if gone := found - self._names:
            raise ArenaError(f"{', '.join(sorted(gone))} was there before {part} and is gone")

    def result(self, array):
        """Declare an array the result of the innermost scope: its caller frees it."""
        outer = self._scopes[-2] if len(self._scopes) > 1 else None
        self._block(array).scope = outer
        return array

    def detach(self, array):
        """Hand an array to an owner that outlives every scope, who must free it."""
        self._block(array).scope = None
        return array

    def leak(self, array, what):
        """The ArenaLeak that says what is wrong with a live tensor: its name, bytes and source line."""
        block = self._block(array)
        return ArenaLeak(f"{block.name}: {show_bytes(array.nbytes)} allocated at {block.source} {what}")

    def expect_balance(self):
        """Check that what is live is what was live when the ledger last restarted.  Raises ArenaLeak."""
        self._expect_only(self.ledger.opening, "the step")

    def _expect_only(self, names, part):
        for block in self._blocks.values():
            if block.name not in names:
                raise self.leak(block.array, f"is still live at the end of {part}")

    def stage(self, name):
        """Begin a stage of the step: forward, loss, backward or update."""
        self.ledger.enter(name)

    def _full_name(self, name):
        return ".".join([scope.name for scope in self._scopes] + [name])

    def _place(self, name, verb, number):
        try:
            return verb(number)
        except OffPlan as error:
            raise ArenaError(f"{name}: {error}") from None

    def _block(self, array):
        try:
            return self._blocks[id(array)]
        except KeyError:
            raise ArenaError(f"an array of shape {array.shape} is not live here: freed before, or a view") from None

    def _record(self, verb, block, was=""):
        source = block.source if verb != "free" else _caller()
        self.ledger.record(verb, block.name, block.array, block.offset, block.category, source, was)

    def _array(self, offset, size, shape, dtype, name):
        if self._memory is None:
            return phantom(shape, dtype)
        self._expect_room(name, offset, size)
        if self._poison:
            self._fill(offset, size)
        return np.frombuffer(self._memory, dtype, size // dtype.itemsize, offset).reshape(shape)

    def _expect_room(self, name, offset, size):
        if self._memory is not None and offset + size > self.capacity:
            raise ArenaFull(f"{name} needs {show_bytes(size)} at offset {offset:,} of {show_bytes(self.capacity)}; "
                            f"live, largest first: {self._listing()}")

    def _fill(self, offset, size):
        if self._memory is not None:
            np.frombuffer(self._memory, np.uint8, size, offset)[:] = 0xFF

    def _listing(self, count=12):
        tensors = self.ledger.tensors()
        rest = [f"and {len(tensors) - count} more"] if len(tensors) > count else []
        return ", ".join([f"{t.name} {show_bytes(t.bytes)}" for t in tensors[:count]] + rest)


class _Scope:
    """A scope is told from another of the same name by identity."""

    def __init__(self, name):
        self.name = name


def phantom(shape, dtype):
    """An array with shape, dtype and nbytes, but no memory: one poisoned element, read-only."""
    dtype = np.dtype(dtype)
    return np.ndarray(shape, dtype, b"\xff" * dtype.itemsize, strides=(0,) * len(shape))


def _fresh_memory(capacity):
    """Anonymous memory of this process alone, as the operating system counts it."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        return mmap.mmap(-1, max(capacity, 1), **private)
    except (OSError, ValueError, OverflowError) as error:
        raise ArenaFull(f"the machine does not give {show_bytes(capacity)}: {error}") from None


def _caller():
    """file:line of the nearest frame that is not the arena's own plumbing."""
    frame = sys._getframe(1)
    while _is_plumbing(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


@cache
def _is_plumbing(file):
    return file in PLUMBING or file.endswith("contextlib.py")


@cache
def _short(file):
    return str(Path(file).relative_to(PACKAGE)) if file.startswith(PACKAGE) else Path(file).name
