"""Faults put in on purpose: each must be seen by the check that guards against it."""

import numpy as np
import pytest

from mesp_np import saved
from mesp_np.arena import ArenaError, ArenaFull, ArenaLeak
from mesp_np.block_backward import TileBackward
from mesp_np.engine import Engine
from mesp_np.ledger import first_difference
from mesp_np.ops import linear, lora, rope
from tests import golden_data, small


def worst_error(method="mesp"):
    golden = golden_data.load("lora_tied")
    with golden_data.engine(method=method) as engine:
        gradients = engine.gradients(golden_data.batch(golden))
    return np.max([np.abs(gradient - golden["grad/" + name]).max() / np.abs(golden["grad/" + name]).max()
                   for name, gradient in gradients.items()])           # NaN if any is NaN


def test_without_a_fault_all_is_well():
    assert worst_error() < 1e-10


def test_rope_dropped_from_the_backward(monkeypatch):
    monkeypatch.setattr(rope, "backward", lambda *_: None)
    assert worst_error() > 1e-2


def test_rope_dropped_from_the_rebuild(monkeypatch):
    _only_in_rebuilds(monkeypatch, rope, "forward", lambda *_: None)
    assert worst_error() > 1e-2


def test_bias_dropped_from_the_rebuild(monkeypatch):
    plain = linear.forward
    _only_in_rebuilds(monkeypatch, linear, "forward",
                      lambda team, out, x, weight, bias=None, plus=None: plain(team, out, x, weight, None, plus))
    assert worst_error() > 1e-2


def test_lora_scale_dropped_from_the_backward(monkeypatch):
    plain = lora.backward_params
    monkeypatch.setattr(lora, "backward_params", lambda *args: plain(*args[:-1], 1.0))
    assert worst_error() > 1e-2


def test_early_free_is_seen(monkeypatch):
    """A tensor freed before its last reader: poison turns the gradients into NaN."""
    plain = TileBackward.mlp

    def hasty(self, dx):
        early, free = self.saved.get("xn2"), self.arena.free
        free(early)
        self.arena.free = lambda array: array is early or free(array)             # not a second time
        plain(self, dx)

    monkeypatch.setattr(TileBackward, "mlp", hasty)
    assert np.isnan(worst_error("mesp"))


def test_leaked_tensor_is_named(monkeypatch):
    plain = TileBackward.attention

    def leaky(self, *args):
        self.arena.alloc("forgotten", (3, 5))
        plain(self, *args)

    monkeypatch.setattr(TileBackward, "attention", leaky)
    with pytest.raises(ArenaLeak, match=r"layer\.1\.forgotten: 60 B .* allocated at .*test_negative_controls\.py:\d+"):
        with small.engine() as engine:
            engine.gradients(small.batch(engine.config, 3, 13))


def test_kept_and_never_released_is_named(monkeypatch):
    monkeypatch.setattr(saved.Saved, "release", lambda self: None)
    with pytest.raises(ArenaLeak, match="rstd1"):
        with small.engine() as engine:
            engine.gradients(small.batch(engine.config, 3, 13))


@pytest.mark.parametrize("room", [1, 2])
def test_unplanned_alloc_is_seen(room):
    """One tensor more than planned is refused, be there room for it or not; and the event lists part there."""
    config = small.model_config()
    with small.engine(config) as engine:
        plan = engine.plan
    with Engine(config, small.weights(config), engine.run, room * plan.extent_bytes) as other:
        other.model.embed = greedy(other)
        with pytest.raises(ArenaError, match="unplanned: 400 B are asked for at event 7; the plan's next is"):
            other.step([small.batch(config, 3, 13)], rate=0.1)
        at, planned, ran = first_difference(plan.ledger.events, other.arena.ledger.events)
        assert planned.name == "layer.0.x" and ran is None and at == len(other.arena.ledger.events)


def greedy(engine):
    plain = engine.model.embed

    def embed(inputs):
        engine.arena.alloc("unplanned", (100,))
        return plain(inputs)

    return embed


def test_an_arena_smaller_than_planned_is_refused_before_the_step():
    config = small.model_config()
    with small.engine(config) as engine:
        plan = engine.plan
    with Engine(config, small.weights(config), engine.run, plan.extent_bytes - 64) as other:
        with pytest.raises(ArenaFull, match="the step needs .*largest first: .*team."):
            other.step([small.batch(config, 3, 13)], rate=0.1)
        assert [event.name for event in other.arena.ledger.events] == ["squares"]


def test_free_of_a_view_is_refused():
    with small.engine() as engine:
        with pytest.raises(ArenaError, match="or a view"):
            engine.arena.free(engine.model.cos[:1])


def _only_in_rebuilds(monkeypatch, module, name, fault):
    """Put `fault` in place of a function while tensors are recomputed, and nowhere else."""
    plain = getattr(module, name)

    def either(team, *args, **kwargs):
        return (fault if team.phase == "recompute" else plain)(team, *args, **kwargs)

    monkeypatch.setattr(module, name, either)
