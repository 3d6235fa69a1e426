"""The ledger: every event of the arena, and what can be read off the list.

Events come first and views second: compositions and differences are read off the event
list, and the running totals follow it event by event, so each can be tested with a list
written by hand.

Two totals are kept apart.  *Live bytes* is the sum of nbytes of the live tensors,
the figure by which methods are compared.  *Extent* is the highest offset in use,
with alignment and what holes there are: what the arena takes from the machine.
"""

from collections import Counter, defaultdict
from functools import cache
from typing import NamedTuple

STAGES = ("forward", "loss", "backward", "update")
CATEGORIES = {
    "adapter": "the LoRA matrices A and B",
    "weight": "weights that are trained or widened",
    "grad": "gradients of what is trained",
    "optimizer": "its moments",
    "checkpoint": "inputs of the blocks, for the backward",
    "kept": "what the method keeps of a block",
    "temp": "in use, and the workers' scratch",
    "logits": "one tile of them, or of their gradient",
    "input": "ids, targets, losses, RoPE tables",
    "weight_tile": "pieces of weights, packed by the workers",
}


class Event(NamedTuple):
    """One thing that happened to one tensor.

    verb    alloc, free or rename
    bytes   nbytes of the tensor; offset its place in the arena
    source  file:line of the code that asked
    live    bytes live after the event
    was     the former name, for a rename
    """

    verb: str
    name: str
    shape: tuple
    dtype: str
    bytes: int
    offset: int
    category: str
    stage: str
    source: str
    live: int
    was: str = ""


class Tensor(NamedTuple):
    """A live tensor, as the ledger lists it."""

    name: str
    bytes: int
    category: str


class Ledger:
    """Events since the last `restart`, with running totals that cost O(1) per event."""

    def __init__(self):
        self.stage = "setup"
        self.live = 0
        self.live_by_category = Counter()
        self._tensors = {}                       # name -> Tensor, live now
        self.restart()

    def restart(self):
        """Begin a new step: forget past events, keep what is live as the opening balance."""
        self.events = []
        self.opening = dict(self._tensors)
        self.live_peak = self.live
        self.peak_at = 0                         # events up to the peak
        self.stage_peaks = defaultdict(int)

    def enter(self, stage):
        """Everything from here on belongs to `stage`."""
        self.stage = stage
        self.stage_peaks[stage] = max(self.stage_peaks[stage], self.live)

    def record(self, verb, name, array, offset, category, source, was=""):
        """Append one event and move the totals."""
        size = array.nbytes
        change = {"alloc": size, "free": -size, "rename": 0}[verb]
        self.live += change
        if verb != "alloc":
            old = self._tensors.pop(was or name)
            self.live_by_category[old.category] -= old.bytes
        if verb != "free":
            self._tensors[name] = Tensor(name, size, category)
            self.live_by_category[category] += size
        self.events.append(Event(verb, name, array.shape, dtype_name(array.dtype), size, offset, category, self.stage,
                                 source, self.live, was))
        self.stage_peaks[self.stage] = max(self.stage_peaks[self.stage], self.live)
        if self.live > self.live_peak:
            self.live_peak, self.peak_at = self.live, len(self.events)

    def place(self, first, offsets):
        """Give the events from the `first` on, whose offsets are numbers of tensors, the tensors' offsets."""
        self.events[first:] = [event._replace(offset=int(offsets[event.offset])) for event in self.events[first:]]

    def tensors(self):
        """The tensors live now, largest first."""
        return largest_first(self._tensors.values())

    def at_peak(self):
        """The tensors live at the peak of this step, largest first."""
        return largest_first(replay(self.opening, self.events[:self.peak_at]).values())

    def category_bytes_at_peak(self):
        """Bytes by category at the peak; they add up to `live_peak`."""
        totals = Counter()
        for tensor in self.at_peak():
            totals[tensor.category] += tensor.bytes
        return dict(totals)

    def stage_peak_bytes(self):
        """The most bytes live within each stage of the step."""
        return {stage: self.stage_peaks.get(stage, 0) for stage in STAGES}

    def compositions(self):
        """Live bytes by category, a Counter: before the first event of the step, and after each."""
        live, categories = Counter(), {tensor.name: tensor.category for tensor in self.opening.values()}
        for tensor in self.opening.values():
            live[tensor.category] += tensor.bytes
        yield Counter(live)
        for event in self.events:
            if event.verb != "alloc":
                live[categories.pop(event.was or event.name)] -= event.bytes
            if event.verb != "free":
                categories[event.name] = event.category
                live[event.category] += event.bytes
            yield Counter(live)

    def staircase(self, points):
        """Live bytes over the events of the step, as the maximum of each of `points` spans."""
        return [max(event.live for event in span) for span in spans(self.events, points)]


@cache
def dtype_name(dtype):
    """`float32`; NumPy builds the name anew each time."""
    return dtype.name


def spans(items, points):
    """A list in order, cut into at most `points` pieces of near equal length; none is empty."""
    items = list(items)
    edges = [len(items) * i // points for i in range(points + 1)]
    return [items[a:b] for a, b in zip(edges, edges[1:]) if b > a]


def largest_first(tensors):
    """Sorted by size, ties by name, so that a listing never depends on chance."""
    return sorted(tensors, key=lambda t: (-t.bytes, t.name))


def replay(opening, events):
    """The live tensors after `events`, from those in `opening` (name -> Tensor)."""
    live = dict(opening)
    for event in events:
        if event.verb != "alloc":
            del live[event.was or event.name]
        if event.verb != "free":
            live[event.name] = Tensor(event.name, event.bytes, event.category)
    return live


def first_difference(events, others):
    """Where two event lists part: (index, event or None, other or None); None when equal."""
    for index in range(max(len(events), len(others))):
        pair = [e[index] if index < len(e) else None for e in (events, others)]
        if pair[0] != pair[1]:
            return index, *pair
    return None


def peak_difference(ledger, other):
    """What two peaks differ in, by tensor: name -> (bytes here, bytes there)."""
    sides = [{t.name: t.bytes for t in side.at_peak()} for side in (ledger, other)]
    names = sorted(set(sides[0]) | set(sides[1]))
    both = {name: tuple(side.get(name, 0) for side in sides) for name in names}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def show_bytes(count):
    """Exact and human at once: `135,921,664 B (129.6 MiB)`.  MiB is 2^20, computed last."""
    return f"{count:,} B ({count / 2**20:.1f} MiB)"
