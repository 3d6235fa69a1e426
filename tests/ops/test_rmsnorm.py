"""RMSNorm, the all-zero row included."""

import numpy as np
import pytest

from mesp_np.ops import rmsnorm
from tests import op_checks

EPS = 1e-6


def reference(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS) * weight


def statistics(team, x):
    rstd = np.empty(len(x), x.dtype)
    rmsnorm.statistics(team, rstd, x, EPS)
    return rstd


@pytest.mark.parametrize("N, D", [(6, 16), (7, 33), (1, 1)])
def test_forward(team, rng, dtype, N, D):
    x, weight, out = op_checks.normal(rng, dtype, (N, D), (D,), (N, D))
    rmsnorm.forward(team, out, x, statistics(team, x), weight)
    op_checks.forward(out, reference, x, weight)


def test_gradient():
    op_checks.gradient("rmsnorm", count=12)


def test_an_all_zero_row(team, rng, dtype):
    """It stays zero, and there the norm is a plain scaling by weight / sqrt(eps)."""
    x, dout, weight = np.zeros((1, 33), dtype), *op_checks.normal(rng, dtype, (1, 33), (33,))
    rstd, out, dx = statistics(team, x), np.empty_like(x), np.zeros_like(x)
    rmsnorm.forward(team, out, x, rstd, weight)
    rmsnorm.backward(team, dx, dout, x, rstd, weight)
    assert not out.any()
    op_checks.forward(dx, lambda dout, weight: dout * weight / EPS ** 0.5, dout, weight)


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_extreme_rows_stay_finite(team, rng, dtype, size):
    x, weight, out = op_checks.normal(rng, dtype, (7, 33), (33,), (7, 33))
    x *= dtype(size)
    rmsnorm.forward(team, out, x, statistics(team, x), weight)
    op_checks.forward(out, reference, x, weight)
