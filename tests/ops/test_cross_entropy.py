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
    """(losses, hits, dlogits)"""
    dlogits, out, hits = logits.copy(), np.empty(C, logits.dtype), np.empty(C, np.int32)
    cross_entropy.backward(team, dlogits, out, hits, LABELS, SCALE)
    return out, hits, dlogits


def by_tiles(team, logits, width):
    """(losses, hits, dlogits)"""
    largest, (total, shrink, out) = np.full(C, -np.inf, logits.dtype), np.zeros((3, C), logits.dtype)
    hits, dlogits, firsts = np.empty(C, np.int32), logits.copy(), range(0, V, width)
    for first in firsts:
        tile = logits[:, first:first + width].copy()
        cross_entropy.accumulate(team, tile, largest, total, shrink, out, LABELS, first)
    cross_entropy.finish(team, out, hits, largest, total)
    for first in firsts:
        cross_entropy.gradient_tile(team, dlogits[:, first:first + width], largest, LABELS, first, SCALE)
    return out, hits, dlogits


def test_by_rows(team, rng, dtype):
    [logits] = op_checks.normal(rng, dtype, (C, V))
    out, hits, dlogits = by_rows(team, logits)
    op_checks.forward(out, losses, logits)
    op_checks.forward(dlogits, gradient, logits)
    alone, alone_hits = np.empty(C, dtype), np.empty(C, np.int32)
    cross_entropy.forward(team, alone, alone_hits, logits, LABELS)
    op_checks.same_bits(alone, out)
    op_checks.same_bits(alone_hits, hits)


@pytest.mark.parametrize("width", [1, 40, 82, V, 100])
def test_by_tiles(team, rng, dtype, width):
    [logits] = op_checks.normal(rng, dtype, (C, V))
    out, _, dlogits = by_tiles(team, logits, width)
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
    cross_entropy.finish(team, out, np.empty(C, np.int32), largest, total)
    cross_entropy.combine(team, dx, weight[LABELS], total, SCALE)
    op_checks.forward(out, lambda x, weight: losses(x @ weight.T), x, weight)
    op_checks.forward(dx, lambda x, weight: gradient(x @ weight.T) @ weight, x, weight)


@pytest.mark.parametrize("width", [1, 40, V])
def test_a_hit_is_a_label_that_nothing_is_likelier_than(team, rng, dtype, width):
    [logits] = op_checks.normal(rng, dtype, (C, V))
    expected = np.arange(C) % 2
    logits[np.arange(C), LABELS] = np.where(expected, 10, -10)
    for _, hits, _ in (by_rows(team, logits), by_tiles(team, logits, width)):
        assert hits.tolist() == expected.tolist()


def test_gradient():
    op_checks.gradient("cross_entropy", count=4)


def test_huge_logits_stay_finite(team, rng, dtype):
    logits = 1e5 * op_checks.normal(rng, dtype, (C, V))[0]
    for out, _, dlogits in (by_rows(team, logits), by_tiles(team, logits, 40)):
        op_checks.forward(out, losses, logits)
        assert np.isfinite(dlogits).all()


def test_the_sum_is_in_float64(team):
    """A million small losses on top of a large one: float32 would lose them all."""
    many, total = np.full(1 << 20, 1, np.float32), np.empty(1)
    many[0] = 1 << 30
    cross_entropy.sum_losses(team, total, many)
    assert total[0] == (1 << 30) + (1 << 20) - 1
