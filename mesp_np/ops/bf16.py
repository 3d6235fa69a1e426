"""Products of numbers rounded to bfloat16, summed in float32: `--compute bf16`.

Shapes    out : (M, N)    a : (M, K)    b : (K, N), as in `matmul.py`

Forward   out_mn = sum_k r(a_mk) r(b_kn),  r the nearest bfloat16, ties to even

          A product of two bfloat16 numbers has 16 bits, so float32 holds it exactly; only the sum
          is rounded.  Both inputs of every large product are rounded: activations, gradients and
          weights of `linear.py`.  LoRA's products with the rank stay in float32: they are a
          hundredth of the work, and they carry the adapter's own small numbers.  Attention
          stays in float32 too: its scores are exponentiated, which turns an error of 2^-9 of a
          score of 100 into a third of a probability.

Backward  of the rounded product with respect to its rounded inputs, as `matmul.py` has it, its inputs
          rounded in turn; the rounding itself counts as the identity (straight-through).  Where a part
          of such a product is taken by itself, as the row of the head's weight that belongs to a
          target, it is rounded as the product has it (`round_rows`): what is left of a difference
          must not be the difference of two roundings.

Saved      nothing
Recomputed nothing
Cost       2 M K N FLOPs

Three back ends; `backend()` says which one is used here.

    TILES    an instruction for whole blocks of pairs of bfloat16 (`amx.py`), ten times as fast as float32
    PAIRS    one for vectors of pairs (`micro.py`): on AMD's CPUs twice as fast as float32.  On Intel's that have
             tiles it takes twice as long, so it is not used there
    PLAIN    the float32 kernel takes the rounded numbers: as exact, not faster

Arm's bfmmla would be another, with a layout of its own beside those of `tiles.py`.  Each sums in an order of its
own, and the instructions take numbers below 2^-126 for zero; so bits depend on the CPU, but on nothing else.

Source    bfloat16: the upper half of IEEE 754 binary32; tdpbf16ps and vdpbf16ps: Intel's AMX-BF16 and AVX-512 BF16.
"""

from functools import cache

import numpy as np

from mesp_np.ops import kernel

TILES, PAIRS = "tdpbf16ps", "vdpbf16ps"
PLAIN = "float32 product of rounded numbers"


@cache
def backend():
    """The name of what multiplies rounded numbers on this CPU: TILES, PAIRS or PLAIN."""
    from mesp_np.ops.vectors import FEATURES, tiles_allowed
    if "amx-bf16" in FEATURES:
        return TILES if tiles_allowed() else PLAIN
    return PAIRS if "avx512bf16" in FEATURES else PLAIN


def round_rows(team, x):
    """x (N, D), in place, as a large product would round it: every number the nearest bfloat16."""
    team.rows(_round_rows, x, flops=0)


@kernel
def _round_rows(x, start, stop):
    for n in range(start, stop):
        for d in range(x.shape[1]):
            x[n, d] = rounded(x[n, d])


@kernel
def upper_half(x):
    """The bits of the bfloat16 nearest to a float32, in the upper half of 32; a NaN stays one."""
    bits = np.float32(x).view(np.uint32)
    nearest = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint32((bits | np.uint32(0x400000) if nan else nearest) & np.uint32(0xFFFF0000))


@kernel
def rounded(x):
    """The bfloat16 nearest to a float32, as a float32."""
    return np.uint32(upper_half(x)).view(np.float32)


@kernel
def pair(even, odd):
    """Two numbers rounded to bfloat16 in 32 bits: the even one in the lower half."""
    return np.uint32(upper_half(odd) | np.uint32(upper_half(even) >> np.uint32(16)))
