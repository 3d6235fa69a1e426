"""Dropout: a mask from a counter, formed wherever it is needed."""

import numpy as np
import pytest

from mesp_np.ops import dropout, noise
from mesp_np.team import Team
from tests import op_checks

KEY, RATE = noise.key(1, 2, 3), 0.3


def mask(team, key=KEY, shape=(60, 700), rate=RATE):
    """What a matrix of ones becomes."""
    out = np.empty(shape)
    dropout.forward(team, out, np.ones(shape), key, rate)
    return out


def test_numbers_are_left_out_or_made_larger(team):
    m = mask(team)
    assert set(np.unique(m)) == {0, 1 / (1 - RATE)}
    kept = np.mean(m > 0)
    assert abs(kept - (1 - RATE)) < 4 * (RATE * (1 - RATE) / m.size) ** 0.5         # four standard errors


def test_neither_rows_nor_columns_are_favoured(team):
    m, spread = mask(team, shape=(400, 400)) > 0, (RATE * (1 - RATE) / 400) ** 0.5
    for axis in (0, 1):
        assert 0.8 < m.mean(axis).std() / spread < 1.2


def test_forward_and_backward_have_one_mask(team, rng, dtype):
    x, dout, base = op_checks.normal(rng, dtype, (7, 33), (7, 33), (7, 33))
    out, dx = np.empty_like(x), base.copy()
    dropout.forward(team, out, x, KEY, RATE)
    dropout.backward(team, dx, dout, KEY, RATE)
    m = mask(team, shape=x.shape)
    op_checks.forward(out, lambda x: m * x, x)
    op_checks.forward(dx, lambda base, dout: base + m * dout, base, dout)


def test_a_tile_of_rows_has_the_mask_of_the_whole(team):
    for first in (0, 3, 57):
        tile = np.empty((3, 700))
        dropout.forward(team, tile, np.ones_like(tile), KEY, RATE, first)
        op_checks.same_bits(tile, mask(team)[first:first + 3])
        added = np.zeros_like(tile)
        dropout.backward(team, added, np.ones_like(tile), KEY, RATE, first)
        op_checks.same_bits(added, tile)


def test_in_place(team, rng, dtype):
    [x] = op_checks.normal(rng, dtype, (7, 33))
    op_checks.alias(team, lambda team, out, x: dropout.forward(team, out, x, KEY, RATE), {"x": x}, {"out": "x"})


def test_gradient():
    op_checks.gradient("dropout", count=3)


@pytest.mark.parametrize("threads", [2, 4])
def test_any_number_of_threads_has_the_same_mask(team, threads):
    with Team(threads) as many:
        op_checks.same_bits(mask(many), mask(team))


def test_keys_give_unrelated_masks(team):
    """Of two masks at 0.3, 0.3 * 0.7 * 2 of the places differ."""
    first, second = (mask(team, noise.key(7, layer, 0)) > 0 for layer in (0, 1))
    assert abs(np.mean(first != second) - 2 * RATE * (1 - RATE)) < 0.02


def test_an_infinite_number_that_is_left_out_is_zero(team):
    out = np.empty((40, 40))
    dropout.forward(team, out, np.full((40, 40), np.inf), KEY, RATE)
    assert not np.isnan(out).any()
