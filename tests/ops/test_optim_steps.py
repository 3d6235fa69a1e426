"""Optimiser steps against their formulas, over three steps so that the moments count."""

import numpy as np

from mesp_np.ops import optim_steps
from mesp_np.ops.fill import fill, flat
from tests import op_checks

RATE, DECAY, CLIP, BETAS, EPS = 0.1, 0.01, 0.5, (0.9, 0.999), 1e-8


def test_sgd(team, rng, dtype):
    param, grad = op_checks.normal(rng, dtype, (7, 33), (7, 33))
    start = param.copy()
    optim_steps.sgd(team, param, grad, RATE, DECAY, CLIP)
    op_checks.forward(param, lambda param, grad: param - RATE * (CLIP * grad + DECAY * param), start, grad)


def adamw(param, *grads):
    first = second = 0
    for step, grad in enumerate(grads, start=1):
        first = BETAS[0] * first + (1 - BETAS[0]) * CLIP * grad
        second = BETAS[1] * second + (1 - BETAS[1]) * (CLIP * grad) ** 2
        mean, square = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
        param = (1 - RATE * DECAY) * param - RATE * mean / (np.sqrt(square) + EPS)
    return param


def test_adamw(team, rng, dtype):
    start, *grads = op_checks.normal(rng, dtype, *4 * [(7, 33)])
    param, first, second = start.copy(), np.zeros_like(start), np.zeros_like(start)
    for step, grad in enumerate(grads, start=1):
        optim_steps.adamw(team, param, grad, first, second, RATE, BETAS, EPS, DECAY, step, CLIP)
    op_checks.forward(param, adamw, start, *grads)


def test_adamw_moves_by_the_rate_at_first(team, rng, dtype):
    """The first step is rate * sign(grad), however small the gradient."""
    [grad] = op_checks.normal(rng, dtype, (7, 33))
    param, first, second = np.zeros((3, 7, 33), dtype)
    optim_steps.adamw(team, param, grad, first, second, RATE, BETAS, 0.0, 0.0, 1, 1e-3)
    np.testing.assert_allclose(param, -RATE * np.sign(grad), rtol=1e-5)


def test_squares_are_summed_in_float64(team):
    grad, total = np.full((1 << 10, 1 << 10), 1, np.float32), np.full(1, 2.0 ** 30)
    optim_steps.add_squares(team, total, grad)
    assert total[0] == 2 ** 30 + 2 ** 20


def test_fill(team, dtype):
    out = np.full((3, 5), np.nan, dtype)
    fill(team, out, -np.inf)
    assert (out == -np.inf).all()


def test_a_view_that_cannot_be_flat_is_refused(dtype):
    with np.testing.assert_raises(ValueError):
        flat(np.zeros((3, 4), dtype).T)
