"""Residual connection."""

from mesp_np.ops import residual
from tests import op_checks


def test_forward(team, rng, dtype):
    branch, x = op_checks.normal(rng, dtype, (7, 33), (7, 33))
    out = branch.copy()
    residual.forward(team, out, x)
    op_checks.same_bits(out, branch + x)


def test_gradient():
    op_checks.gradient("residual", count=6)
