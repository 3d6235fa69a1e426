"""Row arithmetic that kernels share: exponential, largest, sum.

Shapes    row : (n,)

Forward   exp(x), in float32 by steps that a compiler can do for eight numbers at once:
              x = n ln 2 + r with n whole and |r| <= (ln 2) / 2,   exp(x) = 2^n exp(r),
          r by subtracting n ln 2 in two parts, so that no digit is lost; exp(r) by a polynomial of
          degree 7; 2^n by writing n into the exponent's bits.  x is held to [-87, 88], where the
          result is a normal number.  Largest relative error 8e-8, a bit more than half a unit in
          the last place.  In float64 it is the C library's.
          largest(row) = max_i row_i;   total(row) = sum_i row_i in float64, in four interleaved
          parts that are then added, always in this order.

Backward  d exp(x) / dx = exp(x); the ops that call it say what they make of it

Saved      nothing
Recomputed nothing
Cost       counted as one FLOP

Every exponential of the ops is this one, so a value has the same bits wherever it is formed.

Source    Cephes (S. Moshier), expf: the split of ln 2 and the polynomial's coefficients.
"""

import math

import numpy as np

from mesp_np.ops import kernel

LOG2_E, LN2_HIGH, LN2_LOW = (np.float32(c) for c in (1.44269504088896341, 0.693359375, -2.12194440e-4))
C7, C6, C5, C4, C3, C2 = (np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
                                                  1.6666665459e-1, 5.0000001201e-1))


@kernel
def exp(x):
    """e to the x; only the branch of its dtype is compiled."""
    if isinstance(x, np.float32):
        return _exp32(x)
    return math.exp(x)


@kernel
def _exp32(x):
    low, high, half, one = np.float32(-87), np.float32(88), np.float32(0.5), np.float32(1)
    x = low if x < low else high if x > high else x           # a NaN stays one
    n = np.floor(x * LOG2_E + half)
    r = x - n * LN2_HIGH - n * LN2_LOW
    tail = ((((C7 * r + C6) * r + C5) * r + C4) * r + C3) * r + C2
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (tail * r * r + r + one) * power


@kernel
def largest(row):
    """The largest of a row."""
    found = row[0]
    for i in range(1, len(row)):
        found = max(found, row[i])
    return found


@kernel
def total_exp(row, top):
    """The sum of exp(row - top), in float64: the bits of `total` over the stored exponentials."""
    a = b = c = d = 0.0
    whole = len(row) - len(row) % 4
    for i in range(0, whole, 4):
        a += exp(row[i] - top)
        b += exp(row[i + 1] - top)
        c += exp(row[i + 2] - top)
        d += exp(row[i + 3] - top)
    for i in range(whole, len(row)):
        a += exp(row[i] - top)
    return (a + b) + (c + d)


@kernel
def total(row):
    """The sum of a row, in float64."""
    a = b = c = d = 0.0
    whole = len(row) - len(row) % 4
    for i in range(0, whole, 4):
        a += row[i]
        b += row[i + 1]
        c += row[i + 2]
        d += row[i + 3]
    for i in range(whole, len(row)):
        a += row[i]
    return (a + b) + (c + d)
