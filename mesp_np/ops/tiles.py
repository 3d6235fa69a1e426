"""One tile of a matrix product: pieces of the second factor are packed, and multiplied block by block.

Shapes    out    : (M, N)     of which the tile is rows[0] <= i < rows[1] and columns[0] <= j < columns[1]
          a      : (M, K)     any strides
          weight : (K, N)     in its stored form (`quant.factor`); `turned` if it is stored as (N, K)

`matmul.py` says how a product is cut.  In a tile, for `depth` numbers of the summed axis and a strip
of STRIP columns at a time, that part of the weight is packed into panels (`packing.py`): as many columns
as the registers hold, side by side for each k.  Then a panel is multiplied with all rows of the tile,
BLOCK rows at a time (`micro.py`); it is read one line after another, from the nearest cache, and `a`
where it stands.

With --compute bf16 (`bf16.py`) both factors are rounded on the way, `a` into the worker's `room`: of float32
where rounded numbers are multiplied as such, of uint32 where the CPU multiplies pairs of bfloat16.
"""

import numpy as np
from numba import types
from numba.extending import overload

from mesp_np.ops import kernel
from mesp_np.ops.bf16 import pair, rounded
from mesp_np.ops.matmul import BLOCK, STRIP
from mesp_np.ops.micro import multiply_block
from mesp_np.ops.packing import pack, part
from mesp_np.ops.vectors import VECTOR_BYTES, VECTORS

SHALLOW = 32             # pieces up to this depth stay near as a whole strip; rows of the output are then walked along


@kernel
def multiply_tile(out, a, weight, turned, scratch, room, rows, columns, depth, add, scale):
    """The tile of out = scale a weight, or of out += that, with the summed axis in pieces of `depth`."""
    width, K = VECTORS * (VECTOR_BYTES // out.itemsize), a.shape[1]
    for k in range(0, K, depth):
        ks, deep = (k, min(k + depth, K)), min(depth, K - k)
        panels = scratch[:deep * STRIP].reshape(STRIP // width, deep, width)
        edge = scratch[deep * STRIP:deep * STRIP + BLOCK * width].reshape(BLOCK, width)
        scales = scratch[(deep + BLOCK) * STRIP:]
        left, above, start = _left(a, room, rows, ks)
        height = rows[1] - rows[0] if deep > SHALLOW else BLOCK
        for first in range(columns[0], columns[1], STRIP):
            last = min(first + STRIP, columns[1])
            source = part(weight, scales, (first, last), ks) if turned else part(weight, scales, ks, (first, last))
            pack(panels, source, turned, last - first)
            right = _right(panels[:-(-(last - first) // width)], room)
            for i in range(rows[0], rows[1], height):
                for j in range(first, last, width):
                    _multiply_panel(out, left, above, start, right[(j - first) // width], edge,
                                    (i, min(i + height, rows[1])), (j, min(j + width, last)), add or k > 0, scale)


@kernel
def _multiply_panel(out, a, above, k, panel, edge, rows, columns, add, scale):
    """Blocks one below the other; out's row i is a's i - above.  One wider than what is left is formed in `edge`."""
    j, wide = columns[0], columns[1] - columns[0]
    whole = wide == panel.shape[1] and out.strides[1] == out.itemsize
    for i in range(rows[0], rows[1], BLOCK):
        high = min(BLOCK, rows[1] - i)
        if whole:
            multiply_block(out, i, j, a, i - above, k, high, panel, len(panel), add, scale)
            continue
        multiply_block(edge, 0, 0, a, i - above, k, high, panel, len(panel), False, scale)
        for r in range(high):
            for c in range(wide):
                if add:
                    out[i + r, j + c] += edge[r, c]
                else:
                    out[i + r, j + c] = edge[r, c]


def _left(a, room, rows, ks):
    """(factor, above, start): where a, rounded if need be, stands; its row i is i - above there, ks[0] is start."""


@overload(_left)
def _left_by_back_end(a, room, rows, ks):
    def plain(a, room, rows, ks):
        return a, 0, ks[0]

    def rounds(a, room, rows, ks):
        for i in range(rows[0], rows[1]):
            for k in range(ks[0], ks[1]):
                room[i - rows[0], k - ks[0]] = rounded(a[i, k])
        return room, rows[0], 0

    def pairs(a, room, rows, ks):
        for i in range(rows[0], rows[1]):
            for k in range(ks[0], ks[1], 2):
                odd = a[i, k + 1] if k + 1 < ks[1] else a.dtype.type(0)
                room[i - rows[0], (k - ks[0]) // 2] = pair(a[i, k], odd)
        return room, rows[0], 0

    return plain if room == types.none else pairs if room.dtype == types.uint32 else rounds


def _right(panels, room):
    """The panels, rounded in place if need be; a line of pairs is written after both of its lines were read."""


@overload(_right)
def _right_by_back_end(panels, room):
    def plain(panels, room):
        return panels

    def rounds(panels, room):
        for p in range(panels.shape[0]):
            for k in range(panels.shape[1]):
                for j in range(panels.shape[2]):
                    panels[p, k, j] = rounded(panels[p, k, j])
        return panels

    def pairs(panels, room):
        paired, depth = panels.view(np.uint32), panels.shape[1]
        for p in range(panels.shape[0]):
            for k in range(0, depth, 2):
                for j in range(panels.shape[2]):
                    odd = panels[p, k + 1, j] if k + 1 < depth else panels.dtype.type(0)
                    paired[p, k // 2, j] = pair(panels[p, k, j], odd)
        return paired[:, :(depth + 1) // 2]

    return plain if room == types.none else pairs if room.dtype == types.uint32 else rounds
