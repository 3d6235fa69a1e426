"""Traces: slices and counters follow the ledger, and the snapshot is what PyTorch's viewer reads."""

import json
import pickle
from collections import Counter
from itertools import pairwise

import pytest

from mesp_np import trace
from mesp_np.engine import plan_step
from tests import small

METHODS = ["store", "mesp-lean", "mezo"]


@pytest.fixture(params=METHODS)
def plan(request):
    return plan_step(small.model_config(), small.run_config(method=request.param, batch_size=2, seq=20, row_tile=32))


def events(plan, kind):
    return [event for event in trace.trace_events(plan.ledger, "a step") if event["ph"] == kind]


def test_counters_are_the_live_bytes_after_every_event(plan):
    counted = events(plan, "C")
    assert [event["ts"] for event in counted] == list(range(len(plan.ledger.events) + 1))
    totals = [sum(event["args"].values()) for event in counted]
    assert totals[1:] == [event.live for event in plan.ledger.events]
    assert max(totals) == plan.live_peak_bytes
    at_peak = counted[plan.ledger.peak_at]["args"]
    assert {name: size for name, size in at_peak.items() if size} == plan.ledger.category_bytes_at_peak()


def test_slices_of_a_track_follow_each_other(plan):
    for tid, track in enumerate(trace.TRACKS, 1):
        slices = [event for event in events(plan, "X") if event["tid"] == tid]
        assert slices and all(one["ts"] + one["dur"] <= next["ts"] for one, next in pairwise(slices))
        if track != "layer":
            assert sum(one["dur"] for one in slices) == len(plan.ledger.events)


def test_slices_say_where_each_event_belongs(plan):
    slices = events(plan, "X")
    for at, event in enumerate(plan.ledger.events):
        here = {one["tid"]: one["name"] for one in slices if one["ts"] <= at < one["ts"] + one["dur"]}
        assert here[1] == event.stage
        assert here.get(2, "") == trace.layer_of(event.name)
        assert event.verb == "free" or here[3] == event.name


@pytest.mark.parametrize("name, layer", [("layer.11.q", "layer 11"), ("layers.2.mlp.up_proj.lora_A.grad", "layer 2"),
                                         ("model.layers.0.mlp.up_proj.weight", "layer 0"), ("squares", ""),
                                         ("final.rstd", "")])
def test_layers_of_names(name, layer):
    assert trace.layer_of(name) == layer


def test_the_snapshot_adds_up(plan):
    """Played backwards from its end, as the viewer does, it comes to the beginning and passes the peak."""
    found = trace.snapshot(plan)
    [segment], [entries] = found["segments"], found["device_traces"]
    assert segment["total_size"] == plan.extent_bytes == sum(block["size"] for block in segment["blocks"])
    live = {block["address"]: block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"}
    assert sum(live.values()) == segment["active_size"]
    peak = sum(live.values())
    for entry in reversed(entries):
        if entry["action"] == "alloc":
            assert live.pop(entry["addr"]) == entry["size"]
        elif entry["action"] == "free_completed":
            live[entry["addr"]] = entry["size"]
        peak = max(peak, sum(live.values()))
    assert sum(live.values()) == sum(tensor.bytes for tensor in plan.ledger.opening.values())
    assert peak == plan.live_peak_bytes


def test_every_tensor_is_named_with_its_line_of_code(plan):
    [entries] = trace.snapshot(plan)["device_traces"]
    names = Counter(entry["frames"][0]["name"].split(" ")[0] for entry in entries if entry["action"] == "alloc")
    assert names == Counter(event.name for event in plan.ledger.events if event.verb != "free")
    assert all(entry["frames"][0]["filename"].endswith(".py") and entry["frames"][0]["line"] > 0 for entry in entries)


def test_files(plan, tmp_path):
    trace.write(tmp_path, plan, "a step")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(trace.FILES)
    ledger = json.loads((tmp_path / "ledger.json").read_text())
    assert len(ledger["events"]) == len(plan.ledger.events) and ledger["live_peak_bytes"] == plan.live_peak_bytes
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == trace.trace_events(plan.ledger, "a step")
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes()) == trace.snapshot(plan)


@pytest.mark.oracle
def test_pytorch_reads_the_snapshot(plan, tmp_path):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    trace.write(tmp_path, plan, "a step")
    found = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    text = viewer.trace(found)
    assert text.count("\n") > len(plan.ledger.events)
    assert "total_allocated" in viewer.segsum(found) and "<html" in viewer.trace_plot(found).lower() + "<html"
