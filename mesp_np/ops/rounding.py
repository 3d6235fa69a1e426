"""Rounding to bfloat16, row by row: half the bytes for what can bear it.

Shapes    out    : (N, D)    bfloat16 bits, as uint16
          x      : (N, D)

Forward   out_nd = the bfloat16 nearest to x_nd (as a float32), ties to even; `quant.widen` is the way back

Backward  not differentiated: what is rounded is a copy kept for later, not a part of the model

Saved      nothing
Recomputed nothing
Cost       no FLOPs

Source    IEEE 754 binary32, of which bfloat16 is the upper half.
"""

import numpy as np

from mesp_np.ops import expect, kernel
from mesp_np.ops.bf16 import upper_half


def forward(team, out, x):
    """out (N, D) = x rounded."""
    expect(x.shape, out=out)
    team.rows(_round, out, x, flops=0)


@kernel
def _round(out, x, start, stop):
    for n in range(start, stop):
        for d in range(out.shape[1]):
            out[n, d] = np.uint16(upper_half(x[n, d]) >> np.uint32(16))
