"""Dropout on the adapters' inputs: the same masks for every method, and none in evaluation."""

import numpy as np
import pytest

from mesp_np.block import Dropout
from mesp_np.engine import Engine, plan_step
from mesp_np.gradcheck import check_gradient
from mesp_np.methods import METHODS, backprop
from mesp_np.ops import noise
from tests import small

RATE = 0.5


def batch():
    return small.batch(small.model_config(), 3, 13)


def gradients(method, **changes):
    with small.engine(method=method, **({"dropout": RATE} | changes)) as engine:
        return engine.gradients(batch())


@pytest.mark.parametrize("method", small.EXACT[1:])
def test_recomputed_masks_are_those_of_the_forward(method):
    """To the bit, against the method that recomputes nothing."""
    stored = gradients("store")
    for name, grad in gradients(method).items():
        assert grad.tobytes() == stored[name].tobytes()


def test_something_is_left_out_and_the_seed_decides_what():
    first = gradients("mesp")
    for other in (gradients("mesp", dropout=0.0), gradients("mesp", seed=1)):
        assert all(np.abs(grad - other[name]).max() > 1e-6 for name, grad in first.items() if "lora_A" in name)


def test_gradients_pass_finite_differences_with_the_masks_held():
    with small.engine(dtype="float64", method="mesp-lean", dropout=RATE) as engine:
        one = batch()
        made = engine.gradients(one)

        def loss(**_):
            return engine.window_loss([one]) / one.trained_tokens

        inputs = {p.name: p.value for p in engine.parameters}
        checks = check_gradient("dropout", loss, inputs, made, 1e-6, False, np.random.default_rng(0))
        assert all(check.passed for check in checks), [check for check in checks if not check.passed]


def test_no_two_adapters_steps_or_batches_share_a_mask():
    def key(seed, step, index, layer, projection):
        return Dropout(noise.key(seed, step, index), RATE).key(layer, projection)

    keys = {int(key(seed, step, index, layer, projection)) for seed in range(2) for step in range(3)
            for index in range(2) for layer in range(3) for projection in ("q", "v", "down")}
    assert len(keys) == 2 * 3 * 2 * 3 * 3


def test_evaluation_leaves_nothing_out():
    with small.engine(dropout=RATE) as dropped, small.engine() as whole:
        assert dropped.evaluate(batch()) == whole.evaluate(batch())


def test_both_of_mezos_evaluations_have_the_same_masks():
    """With a perturbation too small to matter, the two losses are equal; masks of their own would tell them apart."""
    with small.engine(method="mezo", dropout=RATE, mezo_eps=1e-9, dtype="float64") as engine:
        result = engine.step([batch()], rate=0.0)
    assert result.grad_norm < 1e5            # |c| |z|: c = (difference of the losses) / 2e-9
    with small.engine(dropout=RATE, dtype="float64") as engine:
        engine.steps = 1
        assert result.loss == pytest.approx(engine.window_loss([batch()]) / batch().trained_tokens, rel=1e-9)


def test_each_batch_of_a_window_has_masks_of_its_own():
    with small.engine(dropout=RATE) as engine:
        losses = []
        for index in range(2):
            with engine.model.inputs(batch(), engine._draw(index)) as inputs:
                backprop.forward_losses(engine, inputs)
                losses.append(inputs.losses.copy())
    assert (losses[0] != losses[1]).any()


@pytest.mark.parametrize("method", METHODS)
def test_plan_equals_run(method):
    with small.engine(method=method, dropout=RATE) as engine:
        engine.step([batch()], rate=0.1)
        planned, run = engine.plan.ledger.events, engine.arena.ledger.events
        assert [event[:5] for event in planned] == [event[:5] for event in run]
        assert engine.arena.extent == engine.plan.extent_bytes


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_change_nothing(threads):
    one = gradients("mesp-lean")
    for name, grad in gradients("mesp-lean", threads=threads).items():
        assert grad.tobytes() == one[name].tobytes()


def test_dropout_stores_no_mask():
    """Of what dropout adds, nothing outlives the product that it is made for."""
    config = small.model_config()
    ledgers = [plan_step(config, small.run_config(dropout=rate)).ledger for rate in (0.0, RATE)]
    added = {event.name for event in ledgers[1].events} - {event.name for event in ledgers[0].events}
    assert {name.rpartition(".")[2] for name in added} == {"dropped", "ddropped"}
    assert {event.category for event in ledgers[1].events if event.name in added} == {"temp"}


def test_engine_without_adapters_ignores_dropout():
    config = small.model_config()
    run = small.run_config(trainable="full", dropout=RATE)
    with Engine(config, small.weights(config), run, plan_step(config, run).extent_bytes) as engine:
        assert np.isfinite(engine.step([batch()], rate=0.0).loss)
