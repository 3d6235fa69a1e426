"""Matrix product: every edge of tiles, pieces and vectors, both kinds of transpose, stored weights, equal bits."""

import numpy as np
import pytest

from mesp_np.ops import ShapeError
from mesp_np.ops.matmul import DEPTH, ROWS, STRIP, STRIPS, multiply, piece_depth
from mesp_np.ops.quant import round_bf16, widen
from tests import op_checks, quantised

COLUMNS = STRIPS * STRIP                 # of the widest tile
SHAPES = [(6, 16, 8), (7, 33, 5), (1, 1, 1), (ROWS + 1, 3, COLUMNS + 1), (2, DEPTH + 1, 130),
          (ROWS, 2 * DEPTH, COLUMNS)]


@pytest.mark.parametrize("M, K, N", SHAPES)
def test_forward(team, rng, dtype, M, K, N):
    a, b, out = op_checks.normal(rng, dtype, (M, K), (K, N), (M, N))
    multiply(team, out, a, b)
    op_checks.forward(out, lambda a, b: a @ b, a, b)


@pytest.mark.parametrize("M, K, N", SHAPES)
def test_forward_add(team, rng, dtype, M, K, N):
    a, b, base = op_checks.normal(rng, dtype, (M, K), (K, N), (M, N))
    out = base.copy()
    multiply(team, out, a, b, add=True, scale=0.7)
    op_checks.forward(out, lambda base, a, b: base + 0.7 * (a @ b), base, a, b)


def test_forward_with_a_scale(team, rng, dtype):
    """K in several pieces, each scaled."""
    a, b, out = op_checks.normal(rng, dtype, (7, 2 * DEPTH), (2 * DEPTH, 20), (7, 20))
    multiply(team, out, a, b, scale=0.7)
    op_checks.forward(out, lambda a, b: 0.7 * (a @ b), a, b)


@pytest.mark.parametrize("add", [False, True])
def test_a_second_product_is_added_as_by_itself(team, rng, dtype, add):
    """To the bit, at every tile; and its FLOPs are counted."""
    shape = ROWS + 1, 3 * COLUMNS + 9
    a, b, x, y, base = op_checks.normal(rng, dtype, (shape[0], 40), (40, shape[1]), (shape[0], 8), (shape[1], 8), shape)
    together, apart = base.copy(), base.copy()
    team.flops.clear()
    multiply(team, together, a, b, add=add, plus=(x, y.T, 0.7))
    assert team.flops.total() == 2 * shape[0] * shape[1] * 48
    multiply(team, apart, a, b, add=add)
    multiply(team, apart, x, y.T, 0.7, add=True)
    op_checks.same_bits(together, apart)


def test_what_does_not_fit_is_refused(team):
    """A factor of another dtype would be read as what it is not."""
    one = np.ones((2, 2), np.float32)
    with pytest.raises(TypeError, match="a is float64, out float32"):
        multiply(team, one, one.astype(np.float64), one)
    with pytest.raises(ShapeError, match="nothing to sum"):
        multiply(team, one, one[:, :0], one[:0])
    for a, b in ((one[:1], one), (one[:, :1], one), (one, one[:, :1])):
        with pytest.raises(ShapeError):
            multiply(team, one, one, one, plus=(a, b, 1.0))


def test_gradient():
    op_checks.gradient("matmul", count=10)


def test_transposed_views_and_a_slice_of_the_output(team, rng, dtype):
    a, b, wide = op_checks.normal(rng, dtype, (33, 7), (5, 33), (7, 20))
    before = wide.copy()
    multiply(team, wide[:, 3:8], a.T, b.T)
    op_checks.forward(wide[:, 3:8], lambda a, b: a.T @ b.T, a, b)
    assert (np.delete(wide, range(3, 8), 1) == np.delete(before, range(3, 8), 1)).all()


def codes(bits, group):
    return lambda values: quantised.stored(values, bits, group)


STORES = {"bf16": round_bf16, "float16": np.float16, "float32": np.float32, "float64": np.float64,
          "4 bit": codes(4, 32), "4 bit, group 64": codes(4, 64), "8 bit": codes(8, 64)}
every_store = pytest.mark.parametrize("store", STORES.values(), ids=STORES)


def in_dtype(stored, dtype):
    whole = np.empty(stored.shape, dtype)
    widen(whole, stored)
    return whole


@every_store
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("shape", [(140, 1216), (13, 64)])
def test_a_stored_weight_gives_the_bits_of_the_dense_one(team, rng, dtype, store, transpose, shape):
    """Widened on the way into a panel, exactly; pieces and strips of codes begin and end within groups."""
    stored = store(rng.standard_normal(shape).astype(np.float32))
    whole = in_dtype(stored, dtype)
    if transpose:
        stored, whole = stored.T, whole.T
    a, lazy, dense = op_checks.normal(rng, dtype, (7, len(stored)), *2 * [(7, stored.shape[1])])
    multiply(team, lazy, a, stored)
    multiply(team, dense, a, whole)
    op_checks.same_bits(lazy, dense)


@every_store
def test_a_slice_of_a_stored_weight_is_multiplied_as_what_it_stands_for(team, rng, dtype, store):
    """Rows as of a head's tile, and columns from anywhere, where numbers are read one by one."""
    stored = store(rng.standard_normal((70, 256)).astype(np.float32))
    whole = in_dtype(stored, dtype)
    for part in ((slice(3, 40), slice(0, 256)), (slice(0, 70), slice(40, 200))):
        a, ours, expected = op_checks.normal(rng, dtype, (5, whole[part].shape[1]), *2 * [(5, len(whole[part]))])
        multiply(team, ours, a, stored[part].T)
        multiply(team, expected, a, whole[part].T)
        op_checks.same_bits(ours, expected)


@every_store
@pytest.mark.parametrize("transpose", [False, True])
def test_the_product_with_the_unit_matrix_is_the_weight_itself(team, rng, dtype, store, transpose):
    stored = store(rng.standard_normal((70, 128)).astype(np.float32))
    stored, whole = (stored.T, in_dtype(stored, dtype).T) if transpose else (stored, in_dtype(stored, dtype))
    out = np.empty(stored.shape, dtype)
    multiply(team, out, np.eye(len(stored), dtype=dtype), stored)
    assert (out == whole).all()


def test_every_float16_is_widened_in_the_registers_as_numpy_has_it(team, dtype):
    """Subnormals, infinities and NaNs of either sign, both as they stand and turned."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)[None]
    for factor, shape in ((halves, halves.shape), (halves.reshape(-1, 1).T, halves.shape)):
        out = np.empty(shape, dtype)
        multiply(team, out, np.ones((1, 1), dtype), factor)
        assert np.array_equal(out, halves.astype(dtype), equal_nan=True)
    turned = np.empty((8, 1 << 13), dtype)
    eight = halves.reshape(-1, 8)
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(eight), eight, 0).astype(np.float16)
    multiply(team, turned, np.eye(8, dtype=dtype), finite.T)
    assert (turned == finite.T.astype(dtype)).all()


@pytest.mark.parametrize("K, N", [(2 * DEPTH + 40, 3 * COLUMNS + 9), (33, 8), (5, 70)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(team, rng, dtype, K, N, turned):
    """So a product in row tiles of any size is the whole product, to the bit; and so in columns."""
    a, b = op_checks.normal(rng, dtype, (ROWS + 20, K), (N, K) if turned else (K, N))
    b = b.T if turned else b
    whole, part = np.empty((2, ROWS + 20, N), dtype)
    multiply(team, whole, a, b)
    for size in (1, 7, 64, 256):
        for i in range(0, len(a), size):
            multiply(team, part[i:i + size], a[i:i + size], b)
        op_checks.same_bits(part, whole)
    part = np.empty((len(a), 3), dtype)
    multiply(team, part, a, b[:, 2:5])
    op_checks.same_bits(part, whole[:, 2:5].copy())


def test_a_sum_over_whole_pieces_is_the_sum_piece_by_piece(team, rng, dtype):
    """So a weight's gradient added up over row tiles of DEPTH rows is that of all rows, to the bit."""
    a, b = op_checks.normal(rng, dtype, (3 * DEPTH, 20), (3 * DEPTH, 33))
    whole, parts = np.zeros((2, 20, 33), dtype)
    multiply(team, whole, a.T, b, add=True, scale=0.5)
    for k in range(0, len(a), DEPTH):
        multiply(team, parts, a[k:k + DEPTH].T, b[k:k + DEPTH], add=True, scale=0.5)
    op_checks.same_bits(parts, whole)


def test_another_order_of_the_sum_gives_other_bits(team, rng, dtype):
    """Negative control of the tests above: they would see it."""
    a, b = op_checks.normal(rng, dtype, (9, 700), (700, 40))
    ours, reversed_ = np.empty((2, 9, 40), dtype)
    multiply(team, ours, a, b)
    multiply(team, reversed_, a[:, ::-1], b[::-1])
    assert (ours != reversed_).any()


@pytest.mark.parametrize("K", [1, 31, 32, 513, 896, 1024, 4864, 100_003])
def test_pieces_are_even_and_no_deeper_than_the_scratch(K):
    depth = piece_depth(K)
    assert depth <= DEPTH and (depth == K or depth % 32 == 0)
    assert -(-K // depth) == -(-K // DEPTH)
