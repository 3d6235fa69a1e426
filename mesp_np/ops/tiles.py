"""One tile of a matrix product: pieces of the second factor are packed, and multiplied block by block.

Shapes    out    : (M, N)     of which the tile is rows[0] <= i < rows[1] and columns[0] <= j < columns[1]
          a      : (M, K)     any strides
          weight : (K, N)     in its stored form (`quant.factor`); `turned` if it is stored as (N, K)

`matmul.py` says how a product is cut.  In a tile, for `depth` numbers of the summed axis and a strip
of STRIP columns at a time, that part of the weight is packed into panels (`packing.py`): as many columns
as the registers hold, side by side for each k, or a vector of them where there are few.  Then a panel is
multiplied with all rows of the tile, BLOCK or TALL rows at a time (`micro.py`); it is read one line after
another, from the nearest cache, and `a` where it stands.

With --compute bf16 (`bf16.py`) both factors are rounded on the way, `a` into the worker's `room`, and the type of
that says to what: float32, where rounded numbers are multiplied as such; uint32, where the CPU multiplies pairs
of bfloat16, in vectors; and with four axes where it multiplies blocks of them (`amx.py`).
"""

import numpy as np
from numba import types
from numba.extending import overload

from mesp_np.ops import kernel
from mesp_np.ops.amx import HIGH, multiply_blocks
from mesp_np.ops.bf16 import pair, rounded
from mesp_np.ops.matmul import BLOCK, STRIP
from mesp_np.ops.micro import TALL, multiply_block
from mesp_np.ops.packing import pack, pack_blocks, part
from mesp_np.ops.vectors import VECTOR_BYTES, VECTORS

SHALLOW = 32             # pieces up to this depth stay near as a whole strip; rows of the output are then walked along


@kernel
def multiply_tile(out, a, weight, turned, scratch, room, rows, columns, depth, add, scale):
    """The tile of out = scale a weight, or of out += that, with the summed axis in pieces of `depth`."""
    lanes, K = VECTOR_BYTES // out.itemsize, a.shape[1]
    narrow = room is None and out.shape[1] <= (VECTORS - 1) * lanes
    width, most = (lanes, TALL) if narrow else (VECTORS * lanes, BLOCK)
    for k in range(0, K, depth):
        ks, deep = (k, min(k + depth, K)), min(depth, K - k)
        panels, beside = _panels(scratch, room, deep, width), scratch[-(-deep // 32) * 32 * STRIP:]
        edge, scales = _edge(beside, room, most, width), beside[BLOCK * STRIP:]
        left, above, start = _left(a, room, rows, ks)
        height = rows[1] - rows[0] if deep > SHALLOW or room is not None else most
        for first in range(columns[0], columns[1], STRIP):
            last = min(first + STRIP, columns[1])
            source = part(weight, scales, (first, last), ks) if turned else part(weight, scales, ks, (first, last))
            pack(panels, source, turned, last - first, deep)
            _round(panels, room)
            for i in range(rows[0], rows[1], height):
                for j in range(first, last, width):
                    _multiply_panel(out, left, above, start, panels[(j - first) // width], edge, most,
                                    (i, min(i + height, rows[1])), (j, min(j + width, last)), add or k > 0, scale)


def _multiply_panel(out, a, above, k, panel, edge, most, rows, columns, add, scale):
    """Blocks of `most` rows one below the other; one wider than what is left is formed in `edge`.

    out's row i is a's i - above.
    """


@overload(_multiply_panel)
def _multiply_panel_by_layout(out, a, above, k, panel, edge, most, rows, columns, add, scale):
    def vectors(out, a, above, k, panel, edge, most, rows, columns, add, scale):
        j, wide = columns[0], columns[1] - columns[0]
        whole = wide == panel.shape[1] and out.strides[1] == out.itemsize
        for i in range(rows[0], rows[1], most):
            high = min(most, rows[1] - i)
            if whole:
                multiply_block(out, i, j, a, i - above, k, high, panel, len(panel), add, scale)
            else:
                multiply_block(edge, 0, 0, a, i - above, k, high, panel, len(panel), False, out.dtype.type(1))
                _put(out, i, j, edge, high, wide, add, scale)

    def blocks(out, a, above, k, panel, edge, most, rows, columns, add, scale):
        for j in range(columns[0], columns[1], HIGH):
            for i in range(rows[0], rows[1], HIGH):
                multiply_blocks(edge, a, (i - above) // 16, panel, j - columns[0])
                _put(out, i, j, edge, min(HIGH, rows[1] - i), min(HIGH, columns[1] - j), add, scale)

    return blocks if a.ndim == 4 else vectors


@kernel
def _put(out, i, j, edge, high, wide, add, scale):
    """out[i:i+high, j:j+wide] = scale edge, or += that."""
    for r in range(high):
        line, sums = out[i + r, j:j + wide], edge[r, :wide]
        if add:
            for c in range(wide):
                line[c] += scale * sums[c]
        else:
            for c in range(wide):
                line[c] = scale * sums[c]


def _panels(scratch, room, deep, width):
    """Where a strip of the weight is packed: (STRIP / width, lines, width), of as many lines as the room has."""


@overload(_panels)
def _panels_by_layout(scratch, room, deep, width):
    def numbers(scratch, room, deep, width):
        return scratch[:deep * STRIP].reshape(STRIP // width, deep, width)

    def pairs(scratch, room, deep, width):
        lines = (deep + 1) // 2
        return scratch[:lines * STRIP].view(np.uint32).reshape(STRIP // width, lines, width)

    def blocks(scratch, room, deep, width):
        lines = (deep + 31) // 32 * 16
        return scratch[:lines * STRIP].view(np.uint32).reshape(STRIP // width, lines, width)

    return numbers if room == types.none or room.dtype != types.uint32 else blocks if room.ndim == 4 else pairs


def _edge(beside, room, most, width):
    """Where a block of the output is formed: right beside the panels, or, the larger one of blocks, at the end."""


@overload(_edge)
def _edge_by_layout(beside, room, most, width):
    def small(beside, room, most, width):
        return beside[:most * width].reshape(most, width)

    def large(beside, room, most, width):
        return beside[len(beside) - HIGH * HIGH:].reshape(HIGH, HIGH)

    return large if room != types.none and room.ndim == 4 else small


def _left(a, room, rows, ks):
    """(factor, above, start): where a, rounded if need be, stands; its row i is i - above there, ks[0] is start."""


@overload(_left)
def _left_by_layout(a, room, rows, ks):
    def plain(a, room, rows, ks):
        return a, 0, ks[0]

    def numbers(a, room, rows, ks):
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

    def blocks(a, room, rows, ks):
        used = room[:, :(ks[1] - ks[0] + 31) // 32]
        pack_blocks(used, (a,), rows, ks)
        return used, rows[0], 0

    if room == types.none:
        return plain
    return numbers if room.dtype != types.uint32 else blocks if room.ndim == 4 else pairs


def _round(panels, room):
    """Round panels of numbers in place, where there is room for rounded ones."""


@overload(_round)
def _round_by_layout(panels, room):
    def numbers(panels, room):
        for p in range(panels.shape[0]):
            for k in range(panels.shape[1]):
                for j in range(panels.shape[2]):
                    panels[p, k, j] = rounded(panels[p, k, j])

    return numbers if room != types.none and room.dtype != types.uint32 else lambda panels, room: None
