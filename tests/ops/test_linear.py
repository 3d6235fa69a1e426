"""Linear layer, with a bias and without."""

import numpy as np
import pytest

from mesp_np.ops import linear
from tests import op_checks


@pytest.mark.parametrize("N, I, O", [(6, 16, 8), (7, 33, 5), (1, 1, 1)])
def test_forward(team, rng, dtype, N, I, O):                            # noqa: E741  named as in ops/linear.py
    x, weight, bias, out = op_checks.normal(rng, dtype, (N, I), (O, I), (O,), (N, O))
    linear.forward(team, out, x, weight, bias)
    op_checks.forward(out, lambda x, weight, bias: x @ weight.T + bias, x, weight, bias)
    linear.forward(team, out, x, weight)
    op_checks.forward(out, lambda x, weight: x @ weight.T, x, weight)


def test_gradient():
    op_checks.gradient("linear", count=6)


def test_backward_input_can_add(team, rng, dtype):
    dout, weight, dx = op_checks.normal(rng, dtype, (7, 5), (5, 33), (7, 33))
    before = dx.copy()
    linear.backward_input(team, dx, dout, weight, add=True)
    op_checks.forward(dx, lambda dx, dout, weight: dx + dout @ weight, before, dout, weight)


def test_the_order_of_the_bias_sum_is_the_order_of_the_rows(team, dtype):
    """1, tiny, ..., -1: another order would keep some of the tiny ones."""
    tiny = np.finfo(dtype).eps / 4
    dout, dbias = np.array([[1]] + 8 * [[tiny]] + [[-1]], dtype), np.zeros(1, dtype)
    linear.backward_bias(team, dbias, dout)
    assert dbias[0] == 0
