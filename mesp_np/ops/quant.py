"""Stored forms of a weight: how the bytes of a checkpoint become numbers, a tile at a time.

Shapes    stored, out : (rows, columns)    any tile of a weight

Stored forms
    float32, float64     the numbers themselves
    float16              widened by NumPy, exact
    uint16               bfloat16: the upper half of a float32.  NumPy has no such type,
                         so its bits are kept as uint16; shifting them up by 16 places
                         and reading the result as float32 is exact for every pattern,
                         infinities, NaNs and subnormals included.

Rounding to bfloat16 (`round_bf16`) goes to the nearest, ties to even: add 0x7FFF plus
the lowest bit that stays, then cut.  A NaN must skip the addition, which could carry
its payload into the sign; it keeps its upper half, so every bfloat16 survives the way out
and back.

Source    IEEE 754 binary32; the bfloat16 layout of the safetensors format (dtype BF16).
"""

import numpy as np

from mesp_np.ops import kernel

BF16 = np.dtype(np.uint16)


def dense(tile, buffer):
    """A stored tile as numbers of buffer's dtype: itself when it is so already, else in `buffer`.

    tile    (rows, columns), possibly a transposed view; the result keeps its layout
    buffer  flat scratch with room for the tile
    """
    if tile.dtype == buffer.dtype:
        return tile
    if tile.strides[0] < tile.strides[1]:
        return dense(tile.T, buffer).T
    out = buffer[:tile.size].reshape(tile.shape)
    widen(out, tile)
    return out


def widen(out, stored):
    """out = the numbers that `stored` stands for."""
    if stored.dtype == BF16:
        _widen_bf16(out, stored)
    else:
        np.copyto(out, stored)


def round_bf16(values):
    """float32 values as bfloat16 bits (uint16), to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    upper = bits >> 16
    rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    nan = np.where(upper & 0x7F, upper, upper | 1)         # a payload in the lower half only must not become infinity
    return np.where(np.isnan(values), nan, rounded).astype(BF16)


@kernel
def _widen_bf16(out, stored):
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = np.uint32(np.uint32(stored[i, j]) << np.uint32(16)).view(np.float32)
