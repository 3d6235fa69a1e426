"""Rotary embedding: a rotation of complex numbers, half of a head apart."""

import numpy as np
import pytest

from mesp_np.ops import rope
from tests import op_checks

BASE = 1e4


def reference(x, T, E, first=0):
    """Features i and i + E/2 as one complex number, turned by position * base^(-2i/E)."""
    heads = x.reshape(-1, T, x.shape[1] // E, E)
    angle = np.arange(first, first + T)[:, None, None] * BASE ** (-np.arange(E // 2) / (E // 2))
    turned = (heads[..., :E // 2] + 1j * heads[..., E // 2:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=-1).reshape(x.shape)


def tables(team, dtype, T, E, first=0):
    cos, sin = np.empty((2, T, E // 2), dtype)
    rope.tables(team, cos, sin, BASE, first)
    return cos, sin


@pytest.mark.parametrize("B, T, H, E", [(2, 4, 2, 8), (1, 7, 6, 2), (3, 1, 1, 4), (2, 130, 1, 8)])
def test_forward(team, rng, dtype, B, T, H, E):
    [x] = op_checks.normal(rng, dtype, (B * T, H * E))
    out = x.copy()
    rope.forward(team, out, *tables(team, dtype, T, E))
    op_checks.forward(out, lambda x: reference(x, T, E), x) if dtype is np.float64 or T < 10 else None


def test_gradient():
    op_checks.gradient("rope", count=5)
