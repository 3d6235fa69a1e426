"""Gaussian noise from a counter: the same numbers for any tile, order or thread count.

Shapes    out, base : (M,)    any tensor, seen as one row of numbers; out may be base

Forward   out_i = base_i + scale z_i,      z_i ~ N(0, 1)

          z_i is a function of (key, i) alone.  A counter c is turned into a random word by
              word(key, c) = mix(key + (c + 1) 0x9E3779B97F4A7C15)      (SplitMix64)
          where mix is a bijection of 64-bit words that scatters neighbouring inputs; two
          words give two uniforms u1 in (0, 1] and u2 in [0, 1), and these two normals
              z_2j = sqrt(-2 ln u1) cos(2 pi u2),   z_2j+1 = sqrt(-2 ln u1) sin(2 pi u2)
          (Box and Muller).  z is formed in float64 and rounded once to the array's dtype.

Backward  none: this is what MeZO perturbs with

Saved      nothing; z is formed again whenever it is needed, from 8 bytes of key
Cost       about 20 M FLOPs

Source    Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014;
          Box and Muller, 1958.
"""

import math

import numpy as np

from mesp_np.ops import expect, kernel
from mesp_np.ops.fill import flat

GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


def key(*numbers):
    """One 64-bit key from several whole numbers, such as (seed, step, probe, tensor)."""
    word = 0
    for number in numbers:
        word = _mix_int((word + GOLDEN + number) & MASK)
    return np.uint64(word)


def add_noise(team, out, base, key, scale):
    """out = base + scale z(key), any shape; out may be base."""
    expect(out.shape, base=base)
    team.rows(_add_noise, flat(out), flat(base), key, float(scale), flops=20)


def _mix_int(word):
    word = ((word ^ word >> 30) * FIRST) & MASK
    word = ((word ^ word >> 27) * SECOND) & MASK
    return word ^ word >> 31


@kernel
def uniform(key, counter):
    """A float64 in [0, 1) with 53 random bits."""
    word = key + np.uint64(counter + 1) * np.uint64(GOLDEN)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(FIRST)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(SECOND)
    word = word ^ (word >> np.uint64(31))
    return (word >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def _add_noise(out, base, key, scale, start, stop):
    kind = out.dtype.type
    for pair in range(start // 2, (stop + 1) // 2):
        radius = math.sqrt(-2.0 * math.log(1.0 - uniform(key, 2 * pair)))
        angle = 2.0 * math.pi * uniform(key, 2 * pair + 1)
        if 2 * pair >= start:
            out[2 * pair] = base[2 * pair] + kind(scale * kind(radius * math.cos(angle)))
        if 2 * pair + 1 < stop:
            out[2 * pair + 1] = base[2 * pair + 1] + kind(scale * kind(radius * math.sin(angle)))
