"""Gaussian noise from a counter: the same numbers for any tile, order or thread count.

Shapes    out, base : (M,)    any tensor, seen as one row of numbers; out may be base

Forward   out_i = base_i + scale z_i,      z_i ~ N(0, 1)

          z_i is a function of (key, i) alone.  A counter c is turned into a random word by
              word(key, c) = mix(key + (c + 1) 0x9E3779B97F4A7C15)      (SplitMix64)
          where mix is a bijection of 64-bit words that scatters neighbouring inputs; the upper 52 bits of two
          words give two uniforms u1 in (0, 1] and u2 in [0, 1), and these two normals
              z_2j = sqrt(-2 ln u1) cos(2 pi u2),   z_2j+1 = sqrt(-2 ln u1) sin(2 pi u2)
          (Box and Muller).  z is formed in float64 and rounded once to the array's dtype.

          Logarithm, sine and cosine are polynomials here, so that a compiler can form eight at once, each
          number from its own pair: within 3e-16 of the logarithm, relatively, and 7e-16 of the others.
              ln u = e ln 2 + ln(1 + f),  sqrt(1/2) <= 1 + f <= sqrt(2),  ln(1 + f) = 2 s + s^3 P(s^2),  s = f / (2 + f)
              2 pi u2 = q pi / 2 + t,  q whole and |t| <= pi / 4: sine and cosine of t, changed about and signed by q

Backward  none: this is what MeZO perturbs with

Saved      nothing; z is formed again whenever it is needed, from 8 bytes of key
Cost       about 40 M FLOPs, counted as 20

Source    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014;
          Box and Muller, 1958; fdlibm (Sun Microsystems), e_log, k_sin and k_cos: the coefficients.
"""

import math

import numpy as np

from mesp_np.ops import expect, inlined, kernel
from mesp_np.ops.fill import flat

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
L7, L6, L5, L4, L3, L2, L1 = (1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01,
                              2.222219843214978396e-01, 2.857142874366239149e-01, 3.999999999940941908e-01,
                              6.666666666666735130e-01)
S6, S5, S4, S3, S2, S1 = (1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
                          -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01)
C6, C5, C4, C3, C2, C1 = (-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
                          2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02)


def key(*numbers):
    """One 64-bit key from several whole numbers, such as (seed, step, probe, tensor)."""
    word = 0
    for number in numbers:
        word = _mix_int((word + GOLDEN + number) & MASK)
    return np.uint64(word)


def add_noise(team, out, base, key, scale):
    """out = base + scale z(key), any shape; out may be base."""
    expect(out.shape, base=base)
    team.rows(_add_noise, flat(out), None if base is out else flat(base), key, float(scale), flops=20)


def _mix_int(word):
    word = ((word ^ word >> 30) * FIRST) & MASK
    word = ((word ^ word >> 27) * SECOND) & MASK
    return word ^ word >> 31


@inlined
def uniform(key, counter):
    """A float64 in [0, 1) with 52 random bits: those of a number from 1 to 2, less 1."""
    word = key + np.uint64(counter + 1) * np.uint64(GOLDEN)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(FIRST)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(SECOND)
    word = word ^ (word >> np.uint64(31))
    return np.uint64((word >> np.uint64(12)) | np.uint64(0x3FF << 52)).view(np.float64) - 1.0


@inlined
def normals(key, pair):
    """z_2j and z_2j+1 of a key, in float64, for j = pair."""
    radius = np.sqrt(-2.0 * _log(1.0 - uniform(key, 2 * pair)))
    cosine, sine = _turn(uniform(key, 2 * pair + 1))
    return radius * cosine, radius * sine


@inlined
def _log(u):
    """ln u of a normal float64 u > 0."""
    bits = np.float64(u).view(np.int64)
    fraction = np.int64((bits & np.int64((1 << 52) - 1)) | np.int64(0x3FF << 52)).view(np.float64)
    half = fraction > math.sqrt(2.0)
    f = (0.5 * fraction if half else fraction) - 1.0
    exponent = np.float64(np.int32(bits >> np.int64(52)) - np.int32(1023) + np.int32(half))
    s, square = f / (2.0 + f), 0.5 * f * f
    z = s * s
    rest = z * ((((((L7 * z + L6) * z + L5) * z + L4) * z + L3) * z + L2) * z + L1)
    return exponent * LN2_HIGH - ((square - (s * (square + rest) + exponent * LN2_LOW)) - f)


@inlined
def _turn(u):
    """Cosine and sine of 2 pi u, of u in [0, 1)."""
    quarter = np.floor(4.0 * u + 0.5)
    t = 2.0 * math.pi * (u - 0.25 * quarter)
    z = t * t
    sine = t + t * z * (((((S6 * z + S5) * z + S4) * z + S3) * z + S2) * z + S1)
    cosine = 1.0 - (0.5 * z - z * z * (((((C6 * z + C5) * z + C4) * z + C3) * z + C2) * z + C1))
    odd = quarter == 1.0 or quarter == 3.0
    x, y = (-sine if odd else cosine), (cosine if odd else sine)
    turned = quarter == 2.0 or quarter == 3.0
    return (-x if turned else x), (-y if turned else y)


@kernel
def _add_noise(out, base, key, scale, start, stop):
    kind, outs = out.dtype.type, out[start:stop]
    bases = outs if base is None else base[start:stop]          # if it were passed twice, no vectors could be used
    for n in range(len(outs)):
        x, y = normals(key, (start + n) >> 1)
        outs[n] = bases[n] + kind(scale * kind(y if (start + n) & 1 else x))
