"""Schedules, clipping, and a whole step against one computed by hand."""

import math

import numpy as np
import pytest

from mesp_np.optim import clip_factor, learning_rate
from tests import small

PEAK = 0.5


def rates(steps, schedule, warmup=0):
    return [learning_rate(step, steps, PEAK, schedule, warmup) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_warm_up_is_a_line_to_the_peak(schedule):
    assert rates(12, schedule, 4)[:5] == [PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK, PEAK]
    assert rates(2, schedule, 10) == [PEAK / 10, PEAK / 5]                     # a run shorter than its warm-up
    assert rates(4, schedule, 4) == [PEAK / 4, PEAK / 2, PEAK * 3 / 4, PEAK]   # and one as long
    assert rates(3, schedule)[0] == PEAK


@pytest.mark.parametrize("schedule, middle, last", [
    ("constant", 1.0, 1.0), ("linear", 0.5, 0.1), ("cosine", 0.5, 0.5 + 0.5 * math.cos(0.9 * math.pi))])
@pytest.mark.parametrize("warmup", [0, 3])
def test_decay(schedule, middle, last, warmup):
    """Ten steps after the warm-up: the peak, half-way, and a last step that still moves; zero comes one later."""
    found = rates(warmup + 10, schedule, warmup)[warmup:]
    assert np.allclose([found[0], found[5], found[9]], [PEAK, PEAK * middle, PEAK * last], rtol=1e-14)
    assert found == sorted(found, reverse=True)
    end = learning_rate(warmup + 11, warmup + 10, PEAK, schedule, warmup)
    assert end == (PEAK if schedule == "constant" else 0)


@pytest.mark.parametrize("norm, limit, clipped", [(5.0, 0.0, 5.0), (5.0, 7.0, 5.0), (5.0, 2.0, 2.0), (0.0, 2.0, 0.0)])
def test_clip_factor(norm, limit, clipped):
    """No limit, below it, above it, no gradient at all."""
    factor = clip_factor(np.array([norm ** 2]), limit)
    assert math.isclose(norm * factor, clipped, rel_tol=1e-6)
    assert factor == 1 or norm > limit > 0


def test_a_norm_that_is_not_finite_has_no_factor():
    """Not even where there is no limit, or where infinity would be clipped to nothing."""
    for squares, limit in ((math.nan, 0.0), (math.nan, 2.0), (math.inf, 0.0), (math.inf, 2.0)):
        assert math.isnan(clip_factor(np.array([squares]), limit))


@pytest.mark.parametrize("changes", [dict(), dict(optimizer="adamw", clip=1.0), dict(update="fused"),
                                     dict(method="mezo"), dict(method="mezo", optimizer="adamw")], ids=str)
def test_a_step_whose_gradient_is_not_finite_moves_nothing(changes):
    """One NaN among the frozen weights: parameters and moments keep their bits; without it they move."""
    config, batch = small.model_config(), small.batch(small.model_config(), 3, 13)
    for broken in (False, True):
        with small.engine(config, **changes) as engine:
            moments = [moment for pair in engine.optimizer.moments.values() for moment in pair]
            state = [p.value for p in engine.parameters] + moments
            engine.step([batch], rate=0.01)
            before = [array.tobytes() for array in state]
            if broken:
                engine.model.params.layers[1].linear["up"].weight.value[3, 5] = np.nan
            result = engine.step([batch], rate=0.01)
            assert (math.isnan(result.loss) and math.isnan(result.grad_norm)) == broken
            assert all((array.tobytes() == was) == broken for array, was in zip(state, before, strict=True))


@pytest.mark.parametrize("method", ["mesp", "mezo"])
@pytest.mark.parametrize("limit", [0.5, 1e9])
def test_a_step_moves_by_the_clipped_gradient(method, limit):
    """param -= rate (clip grad + decay param): decay is not clipped, and the norm told is that before."""
    config, rate, decay = small.model_config(), 0.1, 0.3
    batch = small.batch(config, 3, 13)
    with small.engine(config, "float64", method=method, dtype="float64", clip=limit, weight_decay=decay) as engine:
        engine.steps = 1                                         # MeZO's noise is that of the step
        gradients, before = engine.gradients(batch), {p.name: p.value.copy() for p in engine.parameters}
        engine.steps = 0
        result = engine.step([batch], rate)
        after = {p.name: p.value.copy() for p in engine.parameters}
    norm = math.sqrt(sum(np.sum(gradient ** 2) for gradient in gradients.values()))
    assert math.isclose(result.grad_norm, norm, rel_tol=1e-9) and norm > 1
    factor = min(1, limit / (norm + 1e-6))
    for name, value in before.items():
        expected = value - rate * (factor * gradients[name] + decay * value)
        np.testing.assert_allclose(after[name], expected, rtol=1e-9, atol=1e-12, err_msg=name)
