"""Stored forms: bfloat16 bit by bit, and tiles made dense."""

import tracemalloc

import numpy as np
import pytest

from mesp_np.ops.quant import dense, round_bf16, widen
from tests import op_checks

PATTERNS = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)


def bits(*patterns):
    """float32 numbers from their bits."""
    return np.array(patterns, np.uint32).view(np.float32)


def widened(stored, dtype=np.float32):
    out = np.empty(stored.shape, dtype)
    widen(out, stored)
    return out


def test_every_pattern_survives():
    """Out to float32 and back, infinities, subnormals and every NaN included."""
    op_checks.same_bits(round_bf16(widened(PATTERNS)), PATTERNS)


def test_widening_is_a_shift():
    op_checks.same_bits(widened(PATTERNS).view(np.uint32), PATTERNS.astype(np.uint32) << 16)
    numbers = np.isfinite(widened(PATTERNS))
    op_checks.same_bits(widened(PATTERNS, np.float64)[numbers], widened(PATTERNS)[numbers].astype(np.float64))


@pytest.mark.parametrize("nan", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000])
def test_nan_stays_nan(nan):
    """Rounding up would carry the first two into a zero, cutting would make the next two infinite."""
    assert np.isnan(widened(round_bf16(bits([nan]))))


@pytest.mark.parametrize("number, rounded", [
    (0x3F808000, 0x3F80), (0x3F818000, 0x3F82),                     # ties, to even
    (0x3F807FFF, 0x3F80), (0x3F808001, 0x3F81),                     # just below and above one
    (0x7F7FFFFF, 0x7F80), (0xFF7FFFFF, 0xFF80),                     # the largest float32 rounds to infinity
    (0x00008000, 0x0000), (0x00018000, 0x0002), (0x80000001, 0x8000)])
def test_rounding(number, rounded):
    assert round_bf16(bits(number))[0] == rounded


def test_rounding_is_to_nearest(rng):
    """No bfloat16 beside the chosen one is nearer."""
    values = rng.standard_normal(10_000).astype(np.float32)
    chosen = round_bf16(values)
    error = np.abs(widened(chosen[None]) - values)
    for beside in (chosen - 1, chosen + 1):
        assert (error <= np.abs(widened(beside[None]) - values)).all()


@pytest.mark.parametrize("store", [round_bf16, np.float16, np.float32, np.float64], ids=lambda store: store.__name__)
def test_dense(rng, dtype, store):
    """A tile of a weight or of its transpose, in the layout that it came in."""
    weight = store(rng.standard_normal((9, 13)).astype(np.float32))
    for tile in (weight[2:7, 3:], weight.T[3:, 2:7]):
        made = dense(tile, np.empty(100, dtype))
        assert made.dtype == dtype and (made.strides[0] < made.strides[1]) == (tile.strides[0] < tile.strides[1])
        op_checks.same_bits(made, widened(tile, dtype))


def test_a_dense_tile_is_not_copied(dtype):
    tile = np.ones((3, 4), dtype)
    assert dense(tile, np.empty(12, dtype)) is tile


@pytest.mark.parametrize("stored", [np.uint16, np.float16, np.float32, np.float64])
def test_hidden_memory(stored, dtype):
    tile, buffer = np.ones((300, 1000), stored), np.empty(300_000, dtype)
    dense(tile.T, buffer)
    tracemalloc.start()
    dense(tile.T, buffer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < op_checks.HIDDEN_BYTES
