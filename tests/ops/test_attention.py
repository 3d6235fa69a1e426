"""Causal grouped-query attention: whole probabilities and tiles, at every tile edge."""

import numpy as np
import pytest

from mesp_np.ops import attention
from tests import op_checks

SHAPES = [  # B, H, K, T, S, E
    (2, 4, 2, 6, 6, 8), (1, 6, 2, 7, 7, 33), (2, 2, 1, 1, 1, 4), (1, 2, 2, 2, 2, 4), (1, 3, 3, 5, 9, 2),
    (1, 2, 1, 1, 70, 4), (1, 4, 2, 64, 64, 8), (2, 4, 1, 65, 65, 8), (1, 6, 2, 131, 131, 16), (1, 2, 1, 130, 190, 16),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def starts_of(B, T, S, texts=1):
    """starts (B*T,) of so many texts in each sequence, of about equal length."""
    text = (np.arange(T) + S - T) * texts // S
    return np.tile(-(-text * S // texts), B).astype(np.int32)


def reference(q, k, v, starts, B, H, K, T, S, E):
    """ctx and p with plain loops over heads."""
    q, k, v = q.reshape(B, T, H, E), k.reshape(B, S, K, E), v.reshape(B, S, K, E)
    p, ctx = np.zeros((B, H, T, S)), np.zeros((B, T, H, E))
    later = np.arange(S) > np.arange(T)[:, None] + S - T
    for b, h in np.ndindex(B, H):
        g = h // (H // K)
        unseen = later | (np.arange(S) < starts.reshape(B, T, 1)[b])
        scores = np.where(unseen, -np.inf, q[b, :, h] @ k[b, :, g].T / np.sqrt(E))
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        p[b, h] = scores / scores.sum(axis=1, keepdims=True)
        ctx[b, :, h] = p[b, h] @ v[b, :, g]
    return ctx.reshape(B * T, H * E), p


def inputs(rng, dtype, B, H, K, T, S, E):
    return op_checks.normal(rng, dtype, (B * T, H * E), (B * S, K * E), (B * S, K * E))


def whole(team, q, k, v, starts, shape):
    """(ctx, p) by way of whole probabilities."""
    p, ctx = np.full(shape, np.nan, q.dtype), np.empty_like(q)
    attention.probabilities(team, p, q, k, starts)
    attention.context(team, ctx, p, v)
    return ctx, p


def tiles(team, q, k, v, starts, shape):
    ctx, (*_, T, S) = np.empty_like(q), shape
    scratch = np.full((team.threads, attention.forward_scratch(T, S)), np.nan, q.dtype)
    attention.forward(team, ctx, q, k, v, starts, shape, scratch)
    return ctx


def gradients(team, dctx, q, k, v, p, starts, shape):
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    size = attention.backward_scratch(*shape[2:], q.shape[1] // shape[1])
    scratch = np.full((team.threads, size), np.nan, q.dtype)
    attention.backward(team, dq, dk, dv, dctx, q, k, v, p, starts, shape, scratch)
    return dq, dk, dv


@pytest.mark.parametrize("texts", [1, 3])
@every_shape
def test_forward(team, rng, dtype, shape, texts):
    (B, H, _, T, S, _), qkv = shape, inputs(rng, dtype, *shape)
    starts = starts_of(B, T, S, texts)
    ctx, p = whole(team, *qkv, starts, (B, H, T, S))
    op_checks.forward(ctx, lambda *qkv: reference(*qkv, starts, *shape)[0], *qkv)
    op_checks.forward(p, lambda *qkv: reference(*qkv, starts, *shape)[1], *qkv)


def test_gradient():
    op_checks.gradient("attention", count=36)


@pytest.mark.parametrize("texts", [1, 3])
@every_shape
def test_tiles_have_the_bits_of_whole_probabilities(team, rng, dtype, shape, texts):
    (B, H, _, T, S, _), qkv = shape, inputs(rng, dtype, *shape)
    [dctx], starts = op_checks.normal(rng, dtype, qkv[0].shape), starts_of(B, T, S, texts)
    ctx, p = whole(team, *qkv, starts, (B, H, T, S))
    op_checks.same_bits(tiles(team, *qkv, starts, (B, H, T, S)), ctx)
    formed_again, kept = (gradients(team, dctx, *qkv, given, starts, (B, H, T, S)) for given in (None, p))
    for ours, theirs in zip(formed_again, kept, strict=True):
        op_checks.same_bits(ours, theirs)


def test_no_row_sees_a_later_key(team, rng, dtype):
    """Changing the last key and value changes the last row only, to the bit."""
    shape, (q, k, v) = (1, 2, 131, 131), inputs(rng, dtype, 1, 2, 1, 131, 131, 8)
    starts = starts_of(1, 131, 131)
    before = tiles(team, q, k, v, starts, shape)
    k[-1], v[-1] = 100, 100
    after = tiles(team, q, k, v, starts, shape)
    op_checks.same_bits(after[:-1], before[:-1])
    assert (after[-1] != before[-1]).all()


def test_no_text_sees_another(team, rng, dtype):
    """Changing a text's queries, keys, values and gradient changes nothing of its neighbours, to the bit."""
    shape, (q, k, v) = (1, 2, 131, 131), inputs(rng, dtype, 1, 2, 1, 131, 131, 8)
    starts = starts_of(1, 131, 131, texts=3)
    middle = starts == starts[60]
    results = []
    for _ in range(2):
        results.append([tiles(team, q, k, v, starts, shape), *gradients(team, q, q, k, v, None, starts, shape)])
        for array in (q, k, v):
            array[middle] += 1
    for before, after in zip(*results, strict=True):
        op_checks.same_bits(after[~middle], before[~middle])
        assert (after[middle] != before[middle]).any()


def test_huge_scores_stay_finite(team, rng, dtype):
    """Scores of about 1e5: exp(score) is infinite in float32, exp(score - max) is not."""
    shape, (q, k, v) = (1, 2, 67, 67), inputs(rng, dtype, 1, 2, 1, 67, 67, 16)
    q, k = 300 * q, 300 * k
    starts = starts_of(1, 67, 67)
    ctx, p = whole(team, q, k, v, starts, shape)
    assert np.isfinite(ctx).all() and np.isfinite(p).all()
    assert all(np.isfinite(gradient).all() for gradient in gradients(team, ctx, q, k, v, None, starts, shape))
