"""Rotary position embedding: turn pairs of features by an angle that grows with position.

Shapes    x         : (C, H*E)     rows first, first + 1, ... of B*T; H heads of dimension E side by side, in place
          cos, sin  : (T, E/2)     of position t
          starts    : (C,)         where in its sequence the text of row n begins: 0, or more
                                   when several texts are packed into a sequence

Forward   With t = n mod T - starts_n the position of row n of B*T, theta_i = base^(-2i/E) and
          phi = t theta_i, feature i of a head is paired with feature i + E/2 (the "half" convention,
          not i with i+1):
              out_i       = x_i cos phi - x_{i+E/2} sin phi
              out_{i+E/2} = x_{i+E/2} cos phi + x_i sin phi

Backward  A rotation is orthogonal: its inverse is its transpose, the rotation by -phi.
          dx = Jacobian^T dout is therefore the same map with sin negated:
              dx_i       = dout_i cos phi + dout_{i+E/2} sin phi
              dx_{i+E/2} = dout_{i+E/2} cos phi - dout_i sin phi

Saved      nothing: cos and sin are shared by all layers, T E numbers in all
Recomputed nothing
Cost       3 N H E FLOPs either way, and T E sines and cosines once

Angles are products in the run's dtype, as transformers forms them in float32; cosine
and sine are taken in float64 and rounded once.

Source    Su et al., RoFormer, arXiv 2104.09864, eq. 34; pairing as in GPT-NeoX and Qwen2.
"""

import math

from mesp_np.ops import ShapeError, expect, kernel


def tables(team, cos, sin, base):
    """cos, sin (T, E/2) for positions 0 .. T - 1."""
    expect(cos.shape, sin=sin)
    team.rows(_tables, cos, sin, float(base), flops=4)


def forward(team, x, cos, sin, starts, first=0):
    """Rotate x (C, H*E) in place, row n by position n mod T - starts_n; n counts from `first`."""
    _rotate(team, x, cos, sin, starts, first, 1)


def backward(team, dx, cos, sin, starts, first=0):
    """Rotate the gradient dx (C, H*E) back, in place."""
    _rotate(team, dx, cos, sin, starts, first, -1)


def _rotate(team, x, cos, sin, starts, first, sign):
    if x.shape[1] % (2 * cos.shape[1]):
        raise ShapeError(f"x has shape {x.shape}: not whole heads of {2 * cos.shape[1]}")
    expect(cos.shape, sin=sin)
    expect(x.shape[:1], starts=starts)
    team.rows(_rotate_rows, x, cos, sin, starts, first, x.dtype.type(sign), flops=3)


@kernel
def _tables(cos, sin, base, start, stop):
    half = cos.shape[1]
    kind = cos.dtype.type
    for i in range(half):
        frequency = kind(1.0) / kind(base ** (i / half))
        for t in range(start, stop):
            angle = kind(t) * frequency
            cos[t, i] = math.cos(float(angle))
            sin[t, i] = math.sin(float(angle))


@kernel
def _rotate_rows(x, cos, sin, starts, first, sign, start, stop):
    T, half = cos.shape
    for n in range(start, stop):
        t = (first + n) % T - starts[n]
        for head in range(0, x.shape[1], 2 * half):
            for i in range(half):
                a, b = x[n, head + i], x[n, head + half + i]
                c, s = cos[t, i], sign * sin[t, i]
                x[n, head + i] = a * c - b * s
                x[n, head + half + i] = b * c + a * s
