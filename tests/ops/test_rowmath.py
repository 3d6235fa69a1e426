"""The kernels' exponential, largest and sum against NumPy in float64."""

import numpy as np
import pytest

from mesp_np.ops import kernel
from mesp_np.ops.rowmath import exp, largest, total, total_exp


@kernel
def exp_all(out, x):
    for i in range(len(x)):
        out[i] = exp(x[i])


def exponentials(x):
    out = np.empty_like(x)
    exp_all(out, x)
    return out


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-7), (np.float64, 1e-15)])
def test_exp(dtype, tolerance):
    x = np.concatenate([np.linspace(-87, 88, 200_001), np.linspace(-1, 1, 100_001)]).astype(dtype)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(exponentials(x) / exact - 1).max() < tolerance


def test_exp_at_the_ends():
    x = np.array([-np.inf, -1000, 0, 1000, np.inf, np.nan], np.float32)
    out = exponentials(x)
    assert (out[:2] < 2e-38).all() and out[2] == 1 and (out[3:5] > 1e38).all() and np.isnan(out[5])
    assert np.isfinite(out[:5]).all()


@pytest.mark.parametrize("n", [1, 3, 4, 7, 1001])
def test_rows(n, rng, dtype):
    row = rng.standard_normal(n).astype(dtype)
    assert largest(row) == row.max()
    assert abs(total(row) - row.astype(np.float64).sum()) < 1e-12 * n
    assert total_exp(row, row.max()) == total(exponentials(row - row.max()))
