"""SwiGLU, and its exponential far out."""

import numpy as np
import pytest
from numba import types

from mesp_np.ops import swiglu
from mesp_np.ops.compiling import dispatcher
from tests import op_checks


def reference(gate, up):
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("N, F", [(6, 16), (7, 33), (1, 1)])
def test_forward(team, rng, dtype, N, F):
    gate, up, act = op_checks.normal(rng, dtype, (N, F), (N, F), (N, F))
    swiglu.forward(team, act, gate, up)
    op_checks.forward(act, reference, gate, up)


def test_gradient():
    op_checks.gradient("swiglu", count=6)


def test_a_stored_silu_gives_the_same_bits(team, rng, dtype):
    gate, up, silu, stored, act = op_checks.normal(rng, dtype, *5 * [(7, 33)])
    swiglu.silu(team, silu, gate)
    swiglu.product(team, stored, silu, up)
    swiglu.forward(team, act, gate, up)
    op_checks.same_bits(stored, act)


@pytest.mark.parametrize("gate, silu, slope", [
    (0, 0, 0.5), (50, 50, 1), (-50, -50 * np.exp(-50), -49 * np.exp(-50)), (1000, 1000, 1), (-1000, 0, 0)])
def test_far_out(team, dtype, gate, silu, slope):
    """silu and its slope at 0, where it is nearly linear or nearly gone, and where exp overflows."""
    gate, up, one, out = (np.full((1, 1), value, dtype) for value in (gate, 1, 1, 9))
    swiglu.silu(team, out, gate)
    swiglu.backward(team, gate, up, one)
    assert out[0, 0] == up[0, 0] == pytest.approx(silu, rel=1e-6)
    assert gate[0, 0] == pytest.approx(slope, rel=1e-6)


def test_the_sigmoid_keeps_its_dtype():
    sigmoid = dispatcher(swiglu._sigmoid)
    for kind in (types.float32, types.float64):
        sigmoid.compile((kind,))
        assert sigmoid.overloads[(kind,)].signature.return_type == kind
