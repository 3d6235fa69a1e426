"""Matrix product: every tile edge, both kinds of transpose, stored weights."""

import numpy as np
import pytest

from mesp_np.ops.matmul import COLUMNS, DEPTH, ROWS, multiply
from mesp_np.ops.quant import round_bf16, widen
from tests import op_checks, quantised

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


@pytest.mark.parametrize("store", [round_bf16, np.float16, np.float32, codes(4, 32), codes(4, 64), codes(8, 64)],
                         ids=["bf16", "float16", "float32", "4 bit", "4 bit, group 64", "8 bit"])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_stored_weight_gives_the_bits_of_the_dense_one(team, rng, dtype, store, transpose):
    """Widening a tile at a time is exact; tiles of codes begin and end within groups."""
    stored = store(rng.standard_normal((140, 1216)).astype(np.float32))
    whole = np.empty(stored.shape, dtype)
    widen(whole, stored)
    if transpose:
        stored, whole = stored.T, whole.T
    a, lazy, dense = op_checks.normal(rng, dtype, (7, len(stored)), *2 * [(7, stored.shape[1])])
    multiply(team, lazy, a, stored)
    multiply(team, dense, a, whole)
    op_checks.same_bits(lazy, dense)
