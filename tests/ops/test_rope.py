"""Rotary embedding: a rotation of complex numbers, half of a head apart."""

import numpy as np
import pytest

from mesp_np.ops import ShapeError, rope
from tests import op_checks

BASE = 1e4


def reference(x, T, E, dtype, starts=0):
    """Features i and i + E/2 as one complex number, turned by an angle that is rounded to the dtype."""
    heads = x.reshape(-1, T, x.shape[1] // E, E)
    frequency = 1 / (BASE ** (np.arange(E // 2) / (E // 2))).astype(dtype)
    angle = (np.arange(T) - starts).astype(dtype)[:, None, None] * frequency
    turned = (heads[..., :E // 2] + 1j * heads[..., E // 2:]) * np.exp(1j * angle.astype(np.float64))
    return np.concatenate([turned.real, turned.imag], axis=-1).reshape(x.shape)


def places(team, dtype, B, T, E):
    """cos, sin and starts of B sequences of one text each."""
    cos, sin = np.empty((2, T, E // 2), dtype)
    rope.tables(team, cos, sin, BASE)
    return cos, sin, np.zeros(B * T, np.int32)


@pytest.mark.parametrize("B, T, H, E", [(2, 4, 2, 8), (1, 7, 6, 2), (3, 1, 1, 4), (2, 1001, 1, 8)])
def test_forward(team, rng, dtype, B, T, H, E):
    [x] = op_checks.normal(rng, dtype, (B * T, H * E))
    out = x.copy()
    rope.forward(team, out, *places(team, dtype, B, T, E))
    op_checks.forward(out, lambda x: reference(x, T, E, dtype), x)


def test_positions_restart_with_each_text(team, rng, dtype):
    [x] = op_checks.normal(rng, dtype, (14, 24))
    out, (cos, sin, starts) = x.copy(), places(team, dtype, 2, 7, 8)
    starts[:] = [0, 0, 0, 3, 3, 5, 5] * 2
    rope.forward(team, out, cos, sin, starts)
    op_checks.forward(out, lambda x: reference(x, 7, 8, dtype, starts[:7]), x)


def test_gradient():
    op_checks.gradient("rope", count=6)


def test_backward_turns_back(team, rng, dtype):
    [x] = op_checks.normal(rng, dtype, (14, 24))
    out, tables = x.copy(), places(team, dtype, 2, 7, 8)
    rope.forward(team, out, *tables)
    rope.backward(team, out, *tables)
    op_checks.forward(out, lambda x: x, x)


def test_positions_from_a_later_first(team, rng, dtype):
    """One position at a time, as in generation, has the bits of all at once."""
    [x] = op_checks.normal(rng, dtype, (7, 24))
    whole, single = x.copy(), x.copy()
    cos, sin, starts = places(team, dtype, 1, 7, 8)
    rope.forward(team, whole, cos, sin, starts)
    for t in range(7):
        rope.forward(team, single[t:t + 1], cos[t:t + 1], sin[t:t + 1], starts[:1])
    op_checks.same_bits(single, whole)
    op_checks.same_bits(whole[0], x[0])


def test_rows_must_be_whole_heads(team, dtype):
    with pytest.raises(ShapeError, match="not whole heads of 8"):
        rope.forward(team, np.zeros((14, 20), dtype), *places(team, dtype, 2, 7, 8))


@pytest.mark.parametrize("op", [rope.forward, rope.backward])
def test_a_tile_of_rows_is_turned_as_in_the_whole(team, rng, dtype, op):
    [x] = op_checks.normal(rng, dtype, (14, 24))
    whole, tiles, (cos, sin, starts) = x.copy(), x.copy(), places(team, dtype, 2, 7, 8)
    starts[:] = [0, 0, 0, 3, 3, 5, 5] * 2
    op(team, whole, cos, sin, starts)
    for first in range(0, 14, 4):
        op(team, tiles[first:first + 4], cos, sin, starts[first:first + 4], first)
    op_checks.same_bits(tiles, whole)
