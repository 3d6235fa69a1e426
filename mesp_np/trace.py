"""A step's ledger in the forms that viewers of traces open.

    ledger.json      every event, and what was live before the first
    trace.json       Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing
    snapshot.pickle  what torch.cuda.memory._snapshot() gives, for pytorch.org/memory_viz

The ledger knows order and no time, so an event is a microsecond in all of them.

Slices    Three tracks: stages; layers; and what is being made, which is the tensor that was allocated or
          renamed last.  A track's slices follow each other and never overlap.
Counters  live bytes by category, one stacked track

Source    Trace Event Format, Google, 2016: complete events (X), counters (C) and metadata (M); PyTorch's
          torch/cuda/_memory_viz.py and memory_viz: segments with blocks, and traces by device.
"""

import pickle
import re
from itertools import groupby

from mesp_np.checkpoint.atomic import new_file
from mesp_np.json_file import dumps, object_bytes
from mesp_np.ledger import CATEGORIES

LAYER = re.compile(r"layers?\.(\d+)\.")
TRACKS = ("stage", "layer", "being made")
FILES = ("ledger.json", "trace.json", "snapshot.pickle")


def write(folder, plan, title):
    """Write FILES into a folder.  Raises UserError when the system refuses."""
    ledger = plan.ledger
    with new_file(folder / "ledger.json") as file:
        file.write(object_bytes(as_json(ledger, title)))
    with new_file(folder / "trace.json") as file:
        file.write((dumps({"traceEvents": trace_events(ledger, title), "displayTimeUnit": "ms",
                           "otherData": {"time": "a microsecond is an event of the ledger"}}) + "\n").encode())
    with new_file(folder / "snapshot.pickle") as file:
        pickle.dump(snapshot(plan), file, protocol=4)


def as_json(ledger, title):
    """The ledger as plain values."""
    return {"title": title, "live_peak_bytes": ledger.live_peak, "at_peak": [one._asdict() for one in ledger.at_peak()],
            "opening": [one._asdict() for one in ledger.opening.values()],
            "events": [event._asdict() for event in ledger.events]}


def trace_events(ledger, title):
    """The list of a Chrome trace."""
    names = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    names += [{"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}}
              for tid, track in enumerate(TRACKS, 1)]
    return names + [event for tid, keys in enumerate(_tracks(ledger.events), 1) for event in _slices(tid, keys)] + list(
        _counters(ledger))


def layer_of(name):
    """`layer 3` of a tensor's name, or what it belongs to outside of the layers: ""."""
    found = LAYER.match(name.removeprefix("model."))
    return f"layer {found[1]}" if found else ""


def _tracks(events):
    """For each of TRACKS, what every event belongs to."""
    made = []
    for event in events:
        made.append(made[-1] if event.verb == "free" and made else event.name)
    return [event.stage for event in events], [layer_of(event.name) for event in events], made


def _slices(tid, keys):
    """A complete event for every run of equal keys; an empty one is a gap."""
    at = 0
    for key, run in groupby(keys):
        length = len(list(run))
        if key:
            yield {"ph": "X", "pid": 1, "tid": tid, "name": key, "ts": at, "dur": length}
        at += length


def _counters(ledger):
    """Live bytes by category before the step and after each event."""
    made = list(ledger.compositions())
    used = [name for name in CATEGORIES if any(live[name] for live in made)]
    for at, live in enumerate(made):
        yield {"ph": "C", "pid": 1, "name": "live bytes", "ts": at, "args": {name: live[name] for name in used}}


def snapshot(plan):
    """What PyTorch's memory viewer reads: the arena as one segment, and the step's allocations and frees in it."""
    live = {}                                        # name -> event, at the end
    for event in plan.setup_events + plan.ledger.events:
        if event.verb != "alloc":
            del live[event.was or event.name]
        if event.verb != "free":
            live[event.name] = event
    trace = [entry for at, event in enumerate(plan.ledger.events) for entry in _entries(event, at)]
    return {"segments": [_segment(sorted(live.values(), key=lambda event: event.offset), plan.extent_bytes)],
            "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}


def _entries(event, at):
    """The entries of a trace for an event; a tensor with a new name is freed and allocated in its place."""
    common = {"addr": event.offset, "size": event.bytes, "stream": 0, "time_us": at}
    if event.verb != "alloc":
        old = common | {"frames": _frames(event, event.was or event.name)}
        yield from ({"action": action} | old for action in ("free_requested", "free_completed"))
    if event.verb != "free":
        yield {"action": "alloc"} | common | {"frames": _frames(event, event.name)}


def _frames(event, name):
    file, _, line = event.source.partition(":")
    return [{"name": f"{name} {list(event.shape)} {event.dtype}, {event.category}", "filename": file,
             "line": int(line or 0)}]


def _segment(events, size):
    """The arena, with a block for each tensor that is live, and for each gap."""
    blocks, at = [], 0
    for event in [*events, None]:
        start = event.offset if event else size
        if start > at:
            blocks.append({"address": at, "size": start - at, "requested_size": 0, "state": "inactive", "frames": []})
        if event:
            blocks.append({"address": start, "size": event.bytes, "requested_size": event.bytes,
                           "state": "active_allocated", "frames": _frames(event, event.name)})
            at = start + event.bytes
    live = sum(event.bytes for event in events)
    return {"device": 0, "address": 0, "total_size": size, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "allocated_size": live, "active_size": live,
            "requested_size": live, "frames": [], "blocks": blocks}
