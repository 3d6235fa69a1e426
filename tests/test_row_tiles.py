"""Row tiles are a setting of the run: in each size all methods have the same bits, and only kept tensors are whole."""

from collections import Counter

import numpy as np
import pytest

from mesp_np import saved
from mesp_np.block import NAMES
from mesp_np.config import PRESETS, RunConfig
from mesp_np.engine import plan_step
from mesp_np.ops import rope
from tests import golden_data, small
from tests.test_bits import different
from tests.test_plan_equals_run import check

TILES = (1, 7, 13, 39, 64)               # one row, rows that divide nothing, a whole sequence, all rows, more than all


def gradients(**changes):
    with small.engine(**changes) as engine:
        return engine.gradients(small.batch(engine.config, 3, 13))


@pytest.mark.parametrize("row_tile", TILES)
@pytest.mark.parametrize("changes", [dict(), dict(trainable="full", loss="vocab:10"), dict(dropout=0.3, rank=8),
                                     dict(targets=("q_proj", "down_proj"))], ids=str)
def test_methods_agree_to_the_bit(row_tile, changes):
    reference = gradients(method="store", row_tile=row_tile, **changes)
    for method in small.EXACT[1:]:
        assert different(gradients(method=method, row_tile=row_tile, **changes), reference) == [], method


@pytest.mark.parametrize("keep", [("p",), ("gate", "xn2"), ("mid", "v"), ("act", "hu", "q")], ids=",".join)
def test_any_keep_set(keep):
    assert different(gradients(keep=keep, row_tile=7), gradients(method="store", row_tile=7)) == []


@pytest.mark.parametrize("row_tile", TILES)
def test_gradients_are_right(row_tile):
    """Against PyTorch's in float64: a tile that forgot where its rows stand would turn them by wrong angles."""
    golden = golden_data.load("lora_tied")
    with golden_data.engine(method="mesp-lean", row_tile=row_tile) as engine:
        found = engine.gradients(golden_data.batch(golden))
    assert max(np.abs(gradient - golden["grad/" + name]).max() / np.abs(golden["grad/" + name]).max()
               for name, gradient in found.items()) < 1e-10


def test_a_tile_that_forgets_its_place_is_seen(monkeypatch):
    plain = rope.backward
    monkeypatch.setattr(rope, "backward", lambda team, dx, cos, sin, starts, first: plain(team, dx, cos, sin, starts))
    with pytest.raises(AssertionError):
        test_gradients_are_right(7)


@pytest.mark.parametrize("row_tile", TILES)
def test_dropout_masks_do_not_depend_on_tiles(row_tile):
    settings = dict(dropout=0.4, dtype="float64", stored="float64")
    whole, ours = gradients(**settings), gradients(row_tile=row_tile, **settings)
    for name, gradient in ours.items():
        assert np.abs(gradient - whole[name]).max() <= 1e-12 * np.abs(whole[name]).max(), name


@pytest.mark.parametrize("method", (*small.EXACT, "mezo"))
@pytest.mark.parametrize("row_tile", TILES)
def test_plan_equals_run(method, row_tile):
    check(method=method, row_tile=row_tile, loss="vocab:10")


def test_mesp_lean_has_no_whole_array_of_the_mlp():
    config, T, tile = PRESETS["qwen2.5-0.5b"], 1024, 128
    run = RunConfig(method="mesp-lean", batch_size=1, seq=T, optimizer="sgd", row_tile=tile)
    wide = [e for e in plan_step(config, run).ledger.events if e.verb == "alloc" and e.name.startswith("layer.")
            and "lora" not in e.name and e.shape[-1] == config.intermediate_size]
    assert wide and {event.shape[0] for event in wide} == {tile}


@pytest.mark.parametrize("method, streams, key_values", [("mesp-lean", 24 + 1, 4), ("mezo", 2, 2)])
def test_little_but_checkpoints_grows_with_the_sequence(method, streams, key_values):
    """From T to 2T: checkpoints and dx (MeZO: x and out), keys, values and their gradients, scores."""
    config, added = PRESETS["qwen2.5-0.5b"], 4096
    short, long = (plan_step(config, RunConfig(method=method, batch_size=1, seq=T, optimizer="sgd")).live_peak_bytes
                   for T in (added, 2 * added))
    inputs = 24 / 4 + 1 + 1 + config.head_dim                        # ids and the like, losses, rstd1, cos and sin
    row = streams * config.hidden_size + key_values * config.key_width + config.head_dim + inputs
    assert long - short <= 4 * added * row


@pytest.mark.parametrize("B, T, most, expected", [
    (1, 10, 4, [(0, 4, 0), (4, 8, 0), (8, 10, 0)]),
    (2, 3, 2, [(0, 2, 0), (2, 3, 0), (3, 5, 3), (5, 6, 3)]),
    (5, 3, 7, [(0, 6, 0), (6, 12, 6), (12, 15, 12)]),
    (2, 3, 64, [(0, 6, 0)]),
])
def test_tiles_are_whole_sequences_or_parts_of_one(B, T, most, expected):
    found = saved.tiles(B, T, most)
    assert [(tile.rows.start, tile.rows.stop, tile.keys.start) for tile in found] == expected
    assert all(tile.keys.stop == tile.rows.stop for tile in found)
    rows = [(b, t) for tile in found for b in range(B)[tile.sequences] for t in range(T)[tile.queries]]
    assert rows == [(b, t) for b in range(B) for t in range(T)]


def test_how_often_the_leanest_method_makes_a_tensor():
    """In a layer's backward, replay included: what a large product gives once; norms and x A^T where they are read."""
    plan = plan_step(small.model_config(), small.run_config(method="mesp-lean"))
    made = Counter(event.name.removeprefix("layer.1.") for event in plan.ledger.events
                   if event.verb == "alloc" and event.stage == "backward" and event.name.startswith("layer.1."))
    forward = {name: count for name, count in made.items() if name in NAMES}
    assert forward == dict.fromkeys("xn1 xn2".split(), 3) | dict.fromkeys("hq hk hv ho hg hu".split(), 2) | \
        dict.fromkeys("rstd1 q k v ctx mid rstd2 gate up act hd".split(), 1)


def test_queries_are_held_through_the_mlp_only_where_the_context_was_made_from_them():
    def at_peak(keep):
        plan = plan_step(PRESETS["qwen2.5-0.5b"], RunConfig(batch_size=1, seq=256, optimizer="sgd", keep=keep))
        return {tensor.name.rpartition(".")[2] for tensor in plan.ledger.at_peak()}

    assert "q" in at_peak(("rstd1", "k", "v")) and "q" not in at_peak(("p",))
