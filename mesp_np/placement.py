"""Offline placement: where each tensor of a known sequence goes, so that all take little more than the live peak.

A free list (`freelist.py`) places a tensor knowing nothing of those that follow, and leaves holes.
But what a step allocates and frees, and when, follows from its shapes, so it can be placed as a
whole.  A tensor is then a rectangle: as wide as the time from its birth to its death, as high as
its bytes.  The rectangles move up and down only; two that share some time must not share an
address; the highest top, the extent, is to be low.  No extent is below the most bytes live at
once.  The lowest of all is NP-hard to find (dynamic storage allocation), so tensors are placed
one after another, each at the lowest address that is free during its whole life.  Largest first
is a good order, since small tensors fit into what large ones leave.  When that is not the
optimum other orders are tried, and the lowest extent is taken.

    Recorder   sees a sequence once, in the free list's place
    Schedule   what it saw, and where each tensor goes
    Follower   hands out these places when the same sequence comes again; any other is refused,
               so tensors that are live together never overlap

Cost      O(n) NumPy operations of O(n) elements for n tensors: 2,000 take some 60 ms.

Source    The order by size: Pisarchyk and Lee, Efficient Memory Management for Deep Neural Net
          Inference, arXiv 2001.03288, section 5.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mesp_np.freelist import aligned

NEAR = 1.001            # times the live peak: an extent that is low enough
LIMIT = 1 << 62         # above any address
KEPT = 16 << 20         # bytes that the schedules of this process take, at most
SCHEDULES = {}          # what decides a sequence -> its Schedule, the oldest first


class OffPlan(Exception):
    """What is asked for is not what the schedule has next."""


@dataclass(frozen=True)
class Schedule:
    """Tensors in the order of their births, as int64 arrays (n,).

    sizes    bytes, multiples of the alignment
    births   when each is made, and `deaths` when it is freed, counted in allocs and frees
    offsets  bytes from the schedule's start
    """

    sizes: np.ndarray
    births: np.ndarray
    deaths: np.ndarray
    offsets: np.ndarray

    @property
    def extent(self):
        """Bytes that all of it takes."""
        return int(np.max(self.offsets + self.sizes, initial=0))

    @property
    def nbytes(self):
        """Bytes of the arrays themselves."""
        return 4 * self.sizes.nbytes


class Recorder:
    """In a free list's place: gives out numbers for offsets, and notes sizes, births and deaths."""

    def __init__(self):
        self._sizes, self._births, self._deaths = [], [], []
        self._clock = 0

    def alloc(self, size):
        """The number of a new tensor of so many bytes."""
        self._sizes.append(aligned(size))
        self._births.append(self._clock)
        self._deaths.append(None)
        self._clock += 1
        return len(self._sizes) - 1

    def free(self, number):
        """The end of a tensor's life."""
        self._deaths[number] = self._clock
        self._clock += 1

    @cached_property
    def schedule(self):
        """The Schedule of what came, all of it freed again."""
        lives = [np.array(values, np.int64) for values in (self._sizes, self._births, self._deaths)]
        return Schedule(*lives, place(*lives))


class Follower:
    """In the place of a free list: gives out a Schedule's places, counted from `base`.

    Every alloc and free must come when the schedule has it.  Raises OffPlan otherwise.
    """

    def __init__(self, schedule, base):
        self._plan, self._base = schedule, base
        self._numbers = {}                      # offset of a live tensor -> its number
        self._next = self._clock = 0

    def alloc(self, size):
        """Offset of the next tensor."""
        number, count = self._next, len(self._plan.sizes)
        if number == count:
            raise OffPlan(f"{size:,} B are asked for; the plan has {count} tensors, and no other")
        planned, birth = self._plan.sizes[number], self._plan.births[number]
        if (aligned(size), self._clock) != (planned, birth):
            raise OffPlan(f"{size:,} B are asked for at event {self._clock}; the plan's next is tensor {number + 1} of "
                          f"{count}, {planned:,} B at event {birth}")
        offset = self._base + int(self._plan.offsets[number])
        self._numbers[offset] = number
        self._next += 1
        self._clock += 1
        return offset

    def free(self, offset):
        """The end of the life of the tensor at an offset."""
        number = self._numbers.pop(offset, None)
        if number is None:
            raise OffPlan("is not one of the plan's tensors")
        if self._plan.deaths[number] != self._clock:
            raise OffPlan(f"is freed at event {self._clock}; the plan frees it at {self._plan.deaths[number]}")
        self._clock += 1


def keep(key, schedule):
    """Put a Schedule in SCHEDULES, from which the oldest go when there are too many bytes of them."""
    SCHEDULES[key] = schedule
    while len(SCHEDULES) > 1 and sum(kept.nbytes for kept in SCHEDULES.values()) > KEPT:
        del SCHEDULES[next(iter(SCHEDULES))]


def place(sizes, births, deaths):
    """Offsets (n,) of tensors of `sizes` bytes, each live from its birth until its death."""
    lives, best, lowest = deaths - births, None, np.inf
    good = NEAR * live_peak(sizes, births, deaths)
    for weights in ((lives, sizes), (lives * sizes,), (-births,)):              # the last of them counts first
        order = np.lexsort([births, *[-weight for weight in weights]])
        offsets = np.empty_like(sizes)
        offsets[order] = _in_turn(sizes[order], births[order], deaths[order])
        extent = np.max(offsets + sizes, initial=0)
        if extent < lowest:
            best, lowest = offsets, extent
        if lowest <= good:
            break
    return best


def _in_turn(sizes, births, deaths):
    """Offsets (n,): each tensor at the lowest address where none before it in the arrays is in its way."""
    offsets, tops = np.zeros_like(sizes), np.zeros_like(sizes)
    for k, (size, birth, death) in enumerate(zip(sizes, births, deaths)):
        met = np.flatnonzero((births[:k] < death) & (deaths[:k] > birth))
        met = met[np.argsort(offsets[met])]
        floors = np.append(0, np.maximum.accumulate(tops[met]))          # gap g is from floors[g] to ceilings[g]
        ceilings = np.append(offsets[met], LIMIT)
        offsets[k] = floors[np.argmax(ceilings - floors >= size)]
        tops[k] = offsets[k] + size
    return offsets


def live_peak(sizes, births, deaths):
    """The most bytes live at once."""
    changes = np.zeros(max(deaths.max(initial=0), births.max(initial=0)) + 1, np.int64)
    np.add.at(changes, births, sizes)
    np.subtract.at(changes, deaths, sizes)
    return int(changes.cumsum().max())
