"""Stored forms: bfloat16 bit by bit, codes against their definition, and parts of either."""

import tracemalloc

import numpy as np
import pytest

from mesp_np.ops.quant import BITS, GROUPS, SMALLEST_SCALE, Quantised, quantise, round_bf16, widen
from tests import op_checks, quantised

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


@pytest.mark.parametrize("stored", [np.uint16, np.float16, np.float32, np.float64])
def test_hidden_memory(stored, dtype):
    tile, out = np.ones((300, 1000), stored), np.empty((300, 1000), dtype)
    widen(out, tile)
    tracemalloc.start()
    widen(out, tile)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < op_checks.HIDDEN_BYTES


def unpacked(codes, bits):
    """(rows, columns) codes as whole numbers, the first in the lowest bits of its word."""
    places = np.arange(0, 32, bits, dtype=np.uint32)
    return (codes[:, :, np.newaxis] >> places & (1 << bits) - 1).reshape(len(codes), -1).astype(np.int64)


def by_definition(stored, dtype):
    """scale q + bias, with the scale and the bias of each number's group."""
    group = stored.group
    scales, biases = (np.repeat(widened(part, dtype), group, 1) for part in (stored.scales, stored.biases))
    return scales * unpacked(stored.codes, stored.bits).astype(dtype) + biases


def test_a_word_by_hand():
    """Eight codes, lowest bits first; a negative scale, and the four bytes of a word of 8 bits."""
    words = np.full((1, 4), 0x76543210, np.uint32)
    half, minus_two = np.array([[0.5]], np.float16), np.array([[-2]], np.float16)
    assert widened(Quantised(words, half, minus_two, 4))[0, :8].tolist() == [-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5]
    assert widened(Quantised(words, -half, minus_two, 4))[0, :4].tolist() == [-2, -2.5, -3, -3.5]
    eight = Quantised(np.full((1, 8), 0xFF020100, np.uint32), half, minus_two, 8)
    assert widened(eight)[0, :4].tolist() == [-2, -1.5, -1, 125.5]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("store", quantised.STORES)
def test_codes_become_scale_times_code_plus_bias(rng, dtype, bits, group, store):
    stored = quantised.stored(rng.standard_normal((5, 384)).astype(np.float32), bits, group, store)
    op_checks.same_bits(widened(stored, dtype), by_definition(stored, dtype))


def test_every_float16_widens_as_numpy_has_it():
    """As a scale of code 1 and as a bias: subnormals, infinities and NaNs included."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)[:, np.newaxis]
    ones, zeros = np.full((len(halves), 4), 0x11111111, np.uint32), np.zeros_like(halves)
    with np.errstate(invalid="ignore"):
        expected = halves.astype(np.float32)
        for stored in (Quantised(ones, halves, zeros, 4), Quantised(0 * ones, zeros, halves, 4)):
            assert np.array_equal(widened(stored)[:, :1], expected, equal_nan=True)


@pytest.mark.parametrize("bits", BITS)
def test_a_slice_is_a_slice_of_the_dense_weight(rng, dtype, bits):
    """From columns in the middle of a group, and of the transpose; sliced twice as well."""
    stored = quantised.stored(rng.standard_normal((9, 256)).astype(np.float32), bits, 64)
    whole = widened(stored, dtype)
    for rows, columns in ((slice(2, 7), slice(24, 200)), (slice(0, 99), slice(8, 999)), (slice(3, 4), slice(40, 48))):
        op_checks.same_bits(widened(stored[rows, columns], dtype), whole[rows, columns])
        op_checks.same_bits(widened(stored.T[columns, rows].T, dtype), whole[rows, columns])
        op_checks.same_bits(widened(stored[rows][1:, columns], dtype), whole[rows][1:, columns])


def test_a_quantised_weight_has_the_shape_of_the_array_it_stands_for():
    stored = quantised.stored(np.ones((9, 256), np.float32), 4, 64)
    assert stored.shape == (9, 256) and stored.T.shape == (256, 9) and stored.T.T.shape == (9, 256)
    assert len(stored) == 9 and len(stored.T) == 256 and stored.size == stored[:, 8:].size + 9 * 8 == 9 * 256
    assert stored.nbytes == 9 * (128 + 2 * 4 * 2) and stored[2:4].nbytes * 9 == stored.nbytes * 2
    assert stored.T[8:40, 2:5].shape == (32, 3) and stored.group == 64 and stored.ndim == 2


def quantised_plainly(row, bits, group):
    """Codes, scales and biases of one row, number by number, as the format describes them."""
    most, codes, scales, biases = np.float32(2 ** bits - 1), [], [], []
    for part in row.reshape(-1, group):
        low, high = part.min(), part.max()
        scale = max((high - low) / most, SMALLEST_SCALE)
        edge, scale = (low, scale) if abs(low) > abs(high) else (high, -scale)
        zero_point = np.rint(edge / scale)
        scale, bias = (edge / zero_point, edge) if zero_point else (scale, np.float32(0))
        codes += [int(np.clip(np.rint((value - bias) / scale), 0, most)) for value in part]
        scales.append(scale)
        biases.append(bias)
    return codes, scales, biases


def awkward_rows(rng):
    """Random numbers, constants, zeros, one sign only, outliers, ties, the huge and the tiny."""
    rows = rng.standard_normal((12, 256)).astype(np.float32)
    rows[0], rows[1], rows[2] = 0, 3.7, -1.25
    rows[3], rows[4] = -np.abs(rows[3]), np.abs(rows[4])
    rows[5, 7], rows[6] = 30, np.rint(2 * rows[6]) / 2
    rows[7:9] *= np.float32([[1e20], [1e-7]])
    rows[9, :64] = 0
    return rows


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_quantising_is_as_the_format_describes(rng, bits, group):
    rows = awkward_rows(rng)
    codes, scales, biases = quantise(rows, bits, group)
    for row, got in zip(rows, zip(unpacked(codes, bits), scales, biases)):
        for expected, part in zip(quantised_plainly(row, bits, group), got):
            assert np.array_equal(expected, part)


@pytest.mark.parametrize("bits", BITS)
def test_quantising_is_near_and_keeps_zero(rng, bits):
    """Half a step away at most (and the clipped end of an adjusted scale), and what was zero is zero."""
    values = rng.standard_normal((50, 256)).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = 0
    stored = quantised.stored(values, bits, 64, "f32")
    steps = np.abs(np.repeat(stored.scales, 64, 1))
    error = np.abs(widened(stored) - values)
    assert (error <= 0.51 * steps).mean() > 0.99 and (error <= 1.1 * steps).all()
    assert (np.abs(widened(stored)[values == 0]) <= 1e-6).all() and (values == 0).any()


@pytest.mark.parametrize("bits", BITS)
def test_dequantising_allocates_nothing(dtype, bits):
    stored, out = quantised.stored(np.ones((300, 1024), np.float32), bits, 64), np.empty((300, 1016), dtype)
    widen(out, stored[:, 8:])
    tracemalloc.start()
    widen(out, stored[:, 8:])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < op_checks.HIDDEN_BYTES
