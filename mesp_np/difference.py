"""Two steps, tensor by tensor: what `mesp-np plan --json` or `mesp-np trace` wrote of each.

Both say what is live at the peak; ledgers have the events too.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mesp_np.errors import UserError
from mesp_np.json_file import read_object
from mesp_np.ledger import Tensor, first_difference, peak_difference

MAKE = "write one with `mesp-np plan --json > FILE`, or `mesp-np trace OUT`"
TENSOR = Tensor.__annotations__                  # what is said of a tensor at the peak
SAME = ("verb", "name", "was", "bytes", "category", "stage")     # of two events; places and lines of code may differ


@dataclass(frozen=True)
class Step:
    """What a file says of a step.

    tensors  those at the peak
    events   list of dicts, or None of a plan
    """

    live_peak_bytes: int
    tensors: list
    events: list | None

    def at_peak(self):
        """As a Ledger has it."""
        return self.tensors


def load(path):
    """The Step in a file, or in a folder that `mesp-np trace` made.  Raises UserError."""
    file = Path(path) / "ledger.json" if Path(path).is_dir() else Path(path)
    raw = read_object(file, MAKE)
    peak, tensors, events = raw.get("live_peak_bytes"), raw.get("at_peak"), raw.get("events")
    listed = isinstance(tensors, list) and all(map(_is_tensor, tensors)) and type(peak) is int
    if not listed or isinstance(events, list) and not all(isinstance(event, dict) for event in events):
        raise UserError(f"{file}: says neither what a plan nor what a ledger does", MAKE)
    return Step(peak, [Tensor(*(one[key] for key in TENSOR)) for one in tensors],
                events if isinstance(events, list) else None)


def difference(a, b):
    """What two steps differ in, as plain values.

    tensors      name -> [bytes in a, bytes in b] at the peaks, where these differ, by how much they do
    categories   the same by category, of all
    first_event  [index, event of a or None, event of b or None] where two ledgers part; None when they do not, or
                 when one of the two is a plan's
    """
    tensors = peak_difference(a, b)
    order = sorted(tensors, key=lambda name: (-abs(tensors[name][1] - tensors[name][0]), name))
    totals = [_by_category(side) for side in (a, b)]
    categories = {name: [total[name] for total in totals] for name in totals[0] | totals[1]}
    return {"live_peak_bytes": [a.live_peak_bytes, b.live_peak_bytes], "categories": categories,
            "tensors": {name: list(tensors[name]) for name in order}, "first_event": _first_event(a.events, b.events)}


def _by_category(step):
    totals = Counter()
    for tensor in step.tensors:
        totals[tensor.category] += tensor.bytes
    return totals


def _first_event(*sides):
    if None in sides:
        return None
    found = first_difference(*([[event.get(key) for key in SAME] for event in side] for side in sides))
    return found and [found[0], *(side[found[0]] if found[0] < len(side) else None for side in sides)]


def _is_tensor(value):
    return isinstance(value, dict) and all(type(value.get(key)) is kind for key, kind in TENSOR.items())
