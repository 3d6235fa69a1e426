"""LoRA beside a frozen layer."""

import numpy as np
import pytest

from mesp_np.ops import lora
from mesp_np.ops.matmul import multiply
from tests import op_checks

SCALE = 2.5


@pytest.mark.parametrize("N, I, O, R", [(6, 16, 8, 4), (7, 33, 5, 3), (1, 1, 1, 1)])
def test_forward(team, rng, dtype, N, I, O, R):                         # noqa: E741  named as in ops/lora.py
    x, A, B, base = op_checks.normal(rng, dtype, (N, I), (R, I), (O, R), (N, O))
    h, out = np.empty((N, R), dtype), base.copy()
    lora.project(team, h, x, A)
    multiply(team, out, *lora.added(h, B, SCALE), add=True)
    op_checks.forward(out, lambda base, x, A, B: base + SCALE * (x @ A.T) @ B.T, base, x, A, B)


def test_gradient():
    op_checks.gradient("lora", count=6)


def test_backward(team, rng, dtype):
    """Against the formulas of PEFT's layer, y = s B A x."""
    dout, x, A, B = op_checks.normal(rng, dtype, (7, 5), (7, 33), (3, 33), (5, 3))
    h, dh = np.empty((2, 7, 3), dtype)
    dx, dA, dB = np.empty_like(x), np.zeros_like(A), np.zeros_like(B)
    lora.project(team, h, x, A)
    lora.backward_hidden(team, dh, dout, B, SCALE)
    lora.backward_params(team, dA, dB, dh, dout, x, h, SCALE)
    multiply(team, dx, *lora.backward_added(dh, A))
    op_checks.forward(dA, lambda dout, x, B: SCALE * (dout @ B).T @ x, dout, x, B)
    op_checks.forward(dB, lambda dout, x, A: SCALE * dout.T @ (x @ A.T), dout, x, A)
    op_checks.forward(dx, lambda dout, A, B: SCALE * dout @ B @ A, dout, A, B)


def test_a_fresh_adapter_changes_nothing(team, rng, dtype):
    """B starts at zero: the output keeps its bits, and only B gets a gradient."""
    dout, x, A, base = op_checks.normal(rng, dtype, (7, 5), (7, 33), (3, 33), (7, 5))
    B, out, (h, dh) = np.zeros((5, 3), dtype), base.copy(), np.empty((2, 7, 3), dtype)
    dA, dB = np.zeros_like(A), np.zeros_like(B)
    lora.project(team, h, x, A)
    multiply(team, out, *lora.added(h, B, SCALE), add=True)
    lora.backward_hidden(team, dh, dout, B, SCALE)
    lora.backward_params(team, dA, dB, dh, dout, x, h, SCALE)
    op_checks.same_bits(out, base)
    assert not dA.any() and dB.all()
