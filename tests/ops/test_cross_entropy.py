"""Cross entropy: whole rows, and tiles of a vocabulary that they do not divide."""

import numpy as np
import pytest

from mesp_np.ops import cross_entropy
from tests import op_checks

C, V = 7, 83
LABELS = np.array([0, V - 1, 5, 5, 41, 79, 80], np.int32)           # first and last token, a tile's edges
SCALE = 1 / 7


def losses(logits):
    largest = logits.max(axis=1)
    return largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1)) - logits[np.arange(C), LABELS]


def gradient(logits):
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return SCALE * (p / p.sum(axis=1, keepdims=True) - (np.arange(V) == LABELS[:, None]))


def by_rows(team, logits):
    """(losses, dlogits)"""
    dlogits, out = logits.copy(), np.empty(C, logits.dtype)
    cross_entropy.backward(team, dlogits, out, LABELS, SCALE)
    return out, dlogits


def by_tiles(team, logits, width):
    """(losses, dlogits)"""
    largest, (total, shrink, out) = np.full(C, -np.inf, logits.dtype), np.zeros((3, C), logits.dtype)
    dlogits, firsts = logits.copy(), range(0, V, width)
    for first in firsts:
        tile = logits[:, first:first + width].copy()
        cross_entropy.accumulate(team, tile, largest, total, shrink, out, LABELS, first)
    cross_entropy.finish(team, out, largest, total)
    for first in firsts:
        cross_entropy.gradient_tile(team, dlogits[:, first:first + width], largest, LABELS, first, SCALE)
    return out, dlogits


def test_by_rows(team, rng, dtype):
    [logits] = op_checks.normal(rng, dtype, (C, V))
    out, dlogits = by_rows(team, logits)
    op_checks.forward(out, losses, logits)
    op_checks.forward(dlogits, gradient, logits)
    alone = np.empty(C, dtype)
    cross_entropy.forward(team, alone, logits, LABELS)
    op_checks.same_bits(alone, out)


@pytest.mark.parametrize("width", [1, 40, 82, V, 100])
def test_by_tiles(team, rng, dtype, width):
    [logits] = op_checks.normal(rng, dtype, (C, V))
    out, dlogits = by_tiles(team, logits, width)
    op_checks.forward(out, losses, logits)
    op_checks.forward(dlogits, gradient, logits)


@pytest.mark.parametrize("width", [1, 40, 82, V, 100])
def test_streamed_through_a_frozen_head(team, rng, dtype, width):
    """dx = dlogits W, from the exponentials of each tile alone."""
    x, weight = op_checks.normal(rng, dtype, (C, 9), (V, 9))
    largest, (total, shrink, out) = np.full(C, -np.inf, dtype), np.zeros((3, C), dtype)
    dx = np.zeros_like(x)
    for first in range(0, V, width):
        tile = x @ weight[first:first + width].T
        cross_entropy.accumulate(team, tile, largest, total, shrink, out, LABELS, first)
        cross_entropy.shrink_rows(team, dx, shrink)
        dx += tile @ weight[first:first + width]
    cross_entropy.finish(team, out, largest, total)
    cross_entropy.combine(team, dx, weight[LABELS], total, SCALE)
    op_checks.forward(out, lambda x, weight: losses(x @ weight.T), x, weight)
    op_checks.forward(dx, lambda x, weight: gradient(x @ weight.T) @ weight, x, weight)


def test_gradient():
    op_checks.gradient("cross_entropy", count=4)


def test_huge_logits_stay_finite(team, rng, dtype):
    logits = 1e5 * op_checks.normal(rng, dtype, (C, V))[0]
    for out, dlogits in (by_rows(team, logits), by_tiles(team, logits, 40)):
        op_checks.forward(out, losses, logits)
        assert np.isfinite(dlogits).all()


def test_the_sum_is_in_float64(team):
    """A million small losses on top of a large one: float32 would lose them all."""
    many, total = np.full(1 << 20, 1, np.float32), np.empty(1)
    many[0] = 1 << 30
    cross_entropy.sum_losses(team, total, many)
    assert total[0] == (1 << 30) + (1 << 20) - 1
