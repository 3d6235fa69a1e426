"""Rounding to bfloat16 and back, against NumPy's rounding of whole arrays."""

import numpy as np

from mesp_np.ops import rounding
from mesp_np.ops.quant import round_bf16, widen
from tests import op_checks

EDGES = np.array([0, -0.0, 1, 1.00390625, 1.01171875, 3.4e38, -3.4e38, 1e-45, 1.2e-38, np.inf, -np.inf, np.nan],
                 np.float32)


def test_rounds_as_the_checkpoints_do(team, rng):
    x = np.concatenate([EDGES, rng.standard_normal(500, np.float32), rng.integers(0, 2**32, 500, np.uint32).view("f4")])
    x = x.reshape(4, -1)
    out = np.empty(x.shape, np.uint16)
    rounding.forward(team, out, x)
    number = ~np.isnan(x)
    op_checks.same_bits(out[number], round_bf16(x)[number])
    back = np.empty_like(x)
    widen(back, out)
    assert np.isnan(back[~number]).all() and np.signbit(back[0, 1])      # -0.0


def test_every_bfloat16_survives_the_way_back_and_out(team):
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    wide, again = np.empty(bits.shape, np.float32), np.empty_like(bits)
    widen(wide, bits)
    rounding.forward(team, again, wide)
    number = ~np.isnan(wide)
    op_checks.same_bits(again[number], bits[number])


def test_float64_goes_by_way_of_float32(team, rng):
    x = rng.standard_normal((7, 33))
    out = np.empty(x.shape, np.uint16)
    rounding.forward(team, out, x)
    op_checks.same_bits(out, round_bf16(x.astype(np.float32)))
