"""MeBP's names against what PyTorch's autograd saves for the same block (tests/golden/saved_tensors.json)."""

import json

from mesp_np.block import NAMES
from mesp_np.config import ModelConfig
from mesp_np.engine import plan_step
from mesp_np.methods import mebp
from tests import golden_data, small

SAVED = json.loads((golden_data.FOLDER / "saved_tensors.json").read_text())
SIZES = SAVED["sizes"]


def ours():
    """name -> bytes of what `store` keeps in the one block of the measured shape."""
    letters = SIZES
    config = ModelConfig(67, letters["D"], letters["F"], 1, letters["H"], letters["K"], letters["E"], 1e-6, 1e4, True)
    run = small.run_config(method="store", batch_size=letters["B"], seq=letters["T"], rank=letters["R"], alpha=8.0)
    events = plan_step(config, run).ledger.events
    return {event.name.removeprefix("layer.0."): event.bytes for event in events
            if event.name.removeprefix("layer.0.") in NAMES and event.category == "kept"}


def theirs(attention):
    """name -> (bytes, expanded), each storage once."""
    return {row["name"]: (row["bytes"], row.get("expanded", False))
            for row in reversed(SAVED[attention]["tensors"])}


def test_names_are_autograds():
    shared = {"cos", "sin"}                        # saved by every layer, but one copy for all
    assert set(theirs("eager")) - shared == mebp.KEEP | {"x"}


def test_bytes_are_autograds_except_repeated_heads():
    kept, groups = ours(), SIZES["H"] // SIZES["K"]
    for name, (size, expanded) in theirs("eager").items():
        if name in kept:
            assert size == kept[name] * (groups if expanded else 1), name
    assert {name for name, (_, expanded) in theirs("eager").items() if expanded} == {"k", "v"}


def test_total():
    kept, shared = ours(), 2 * 4 * SIZES["T"] * SIZES["E"]
    repeated = (SIZES["H"] // SIZES["K"] - 1) * (kept["k"] + kept["v"])
    assert sum(kept.values()) + repeated + shared == SAVED["eager"]["bytes"]


def test_fused_attention_keeps_no_probabilities():
    assert set(theirs("sdpa")) - {"cos", "sin", "lse"} == (mebp.KEEP | {"x"}) - {"p"}
