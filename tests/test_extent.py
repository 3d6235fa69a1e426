"""What the arena takes from the machine is hardly more than the live peak."""

from dataclasses import replace

import pytest

from mesp_np import placement
from mesp_np.config import PRESETS, RunConfig
from mesp_np.engine import Engine, plan_loss, plan_step
from mesp_np.freelist import FreeList
from mesp_np.methods import METHODS
from tests import small

QWEN = replace(PRESETS["qwen2.5-0.5b"], num_hidden_layers=6)
ABOVE = 1.01


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seq, optimizer, update, loss", [
    (128, "sgd", "after", "vocab"), (256, "adamw", "fused", "rows"), (512, "sgd", "after", "rows"),
    (1024, "adamw", "after", "vocab")])
def test_of_a_large_model(method, seq, optimizer, update, loss):
    run = RunConfig(method=method, batch_size=1, seq=seq, optimizer=optimizer, update=update, loss=loss)
    plan = plan_step(QWEN, run)
    assert plan.live_peak_bytes <= plan.extent_bytes <= ABOVE * plan.live_peak_bytes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [
    dict(), dict(batch_size=4, seq=64), dict(trainable="full", loss="rows"), dict(grad_accumulation=3)], ids=str)
def test_of_the_tiny_model(method, changes):
    run = RunConfig(**(dict(method=method, batch_size=1, seq=256) | changes))
    plan = plan_step(PRESETS["tiny"], run)
    assert plan.extent_bytes <= ABOVE * plan.live_peak_bytes


def test_a_free_list_alone_takes_more():
    """A control: the same events, each tensor placed as it comes."""
    plan = plan_step(QWEN, RunConfig(batch_size=1, seq=1024, optimizer="sgd"))
    places, offsets = FreeList(), {}
    for event in plan.setup_events + plan.ledger.events:
        if event.verb == "alloc":
            offsets[event.name] = places.alloc(event.bytes)
        elif event.verb == "rename":
            offsets[event.name] = offsets.pop(event.was)
        else:
            places.free(offsets.pop(event.name))
    assert places.extent > ABOVE * plan.live_peak_bytes


@pytest.mark.parametrize("method", METHODS)
def test_other_work_fits_in_the_arena_of_a_step(method):
    """GIVEN an arena of a step's plan WHEN gradients, an evaluation and a loss are asked for THEN they fit."""
    with small.engine(method=method, optimizer="adamw") as engine:
        batch = small.batch(engine.config, 3, 13)
        engine.gradients(batch)
        engine.step([batch], rate=1e-3)
        engine.evaluate(batch)
        assert engine.arena.extent == engine.plan.extent_bytes
        assert plan_loss(engine.config, engine.run, (3, 13), small.weights(engine.config)) <= engine.plan.extent_bytes


def test_a_part_is_placed_once(monkeypatch):
    """Whoever plans or runs the same again follows the first plan's schedule, gradients alone included."""
    calls, plain = [], placement.place
    monkeypatch.setattr(placement, "place", lambda *lives: calls.append(len(lives[0])) or plain(*lives))
    config, run = small.model_config(), small.run_config()
    plans = [plan_step(config, run) for _ in range(2)]
    with Engine(config, small.weights(config), run, plans[0].extent_bytes) as engine:
        for action in (engine.gradients, lambda batch: engine.step([batch], rate=1e-3)):
            action(small.batch(config, 3, 13))
    assert plans[0].ledger.events == plans[1].ledger.events == engine.arena.ledger.events
    assert calls == [sum(event.verb == "alloc" and event.name != "squares" for event in plans[0].ledger.events)]


def test_schedules_take_a_bounded_number_of_bytes(monkeypatch):
    """The oldest go first, and the newest stays even if it alone is too large."""
    config, runs = small.model_config(), [small.run_config(seed=seed) for seed in range(4)]
    plan_step(config, runs[0])
    one, = [schedule.nbytes for schedule in placement.SCHEDULES.values()]
    for kept, stay in ((3 * one, 3), (3 * one - 1, 2), (0, 1)):
        monkeypatch.setattr(placement, "KEPT", kept)
        placement.SCHEDULES.clear()
        for run in runs:
            plan_step(config, run)
        assert [key[1] for key in placement.SCHEDULES] == runs[-stay:]


@pytest.mark.parametrize("grad_accumulation", [1, 3])
def test_an_engine_without_a_plan_rehearses_for_itself(grad_accumulation):
    """GIVEN a roomy arena and no plan WHEN batches of several shapes come THEN each has its own schedule."""
    config, run = small.model_config(), small.run_config(grad_accumulation=grad_accumulation)
    shapes = [(3, 13), (1, 5), (2, 9)]
    with Engine(config, small.weights(config), run, 1 << 20, poison=True) as engine:
        for first in range(0, 3, grad_accumulation):
            window = [small.batch(config, *shape) for shape in shapes[first:first + grad_accumulation]]
            assert engine.step(window, rate=1e-3).loss > 0
