"""Two steps, tensor by tensor: what `mesp-np plan --json` or `mesp-np trace` wrote of each.

Both say what is live at the peak; ledgers have the events too.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mesp_np.errors import UserError
from mesp_np.json_file import read_object

MAKE = "write one with `mesp-np plan --json > FILE`, or `mesp-np trace OUT`"
TENSOR = {"name": str, "bytes": int, "category": str}
SAME = ("verb", "name", "was", "bytes", "category", "stage")     # of two events; places and lines of code may differ


@dataclass(frozen=True)
class Step:
    """What a file says of a step.

    at_peak  name -> (bytes, category)
    events   list of dicts, or None of a plan
    """

    path: str
    live_peak_bytes: int
    at_peak: dict
    events: list | None


def load(path):
    """The Step in a file, or in a folder that `mesp-np trace` made.  Raises UserError."""
    file = Path(path) / "ledger.json" if Path(path).is_dir() else Path(path)
    raw = read_object(file, MAKE)
    peak, tensors, events = raw.get("live_peak_bytes"), raw.get("at_peak"), raw.get("events")
    listed = isinstance(tensors, list) and all(map(_is_tensor, tensors)) and type(peak) is int
    if not listed or isinstance(events, list) and not all(isinstance(event, dict) for event in events):
        raise UserError(f"{file}: says neither what a plan nor what a ledger does", MAKE)
    return Step(str(file), peak, {one["name"]: (one["bytes"], one["category"]) for one in tensors},
                events if isinstance(events, list) else None)


def difference(a, b):
    """What two steps differ in, as plain values.

    tensors      name -> [bytes in a, bytes in b] at the peaks, where these differ, by how much they do
    categories   the same by category, of all
    first_event  [index, event of a or None, event of b or None] where two ledgers part; None when they do not, or
                 when one of the two is a plan's
    """
    names = {name: [side.at_peak.get(name, (0, ""))[0] for side in (a, b)] for name in a.at_peak | b.at_peak}
    tensors = {name: sizes for name, sizes in names.items() if sizes[0] != sizes[1]}
    order = sorted(tensors, key=lambda name: (-abs(tensors[name][1] - tensors[name][0]), name))
    totals = [_by_category(side) for side in (a, b)]
    categories = {name: [total[name] for total in totals] for name in totals[0] | totals[1]}
    return {"live_peak_bytes": [a.live_peak_bytes, b.live_peak_bytes], "categories": categories,
            "tensors": {name: tensors[name] for name in order}, "first_event": _first_event(a.events, b.events)}


def _by_category(step):
    totals = Counter()
    for size, category in step.at_peak.values():
        totals[category] += size
    return totals


def _first_event(events, others):
    if events is None or others is None:
        return None
    for index in range(max(len(events), len(others))):
        pair = [side[index] if index < len(side) else None for side in (events, others)]
        if None in pair or any(pair[0].get(key) != pair[1].get(key) for key in SAME):
            return [index, *pair]
    return None


def _is_tensor(value):
    return isinstance(value, dict) and all(type(value.get(key)) is kind for key, kind in TENSOR.items())
