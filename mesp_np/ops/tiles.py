"""One tile of a matrix product: pieces of the second factor are packed, and multiplied block by block.

Shapes    out    : (M, N)     of which the tile is rows[0] <= i < rows[1] and columns[0] <= j < columns[1]
          a      : (M, K)     any strides
          weight : (K, N)     in its stored form (`quant.factor`); `turned` if it is stored as (N, K)

`matmul.py` says how a product is cut.  In a tile, for `depth` numbers of the summed axis and a strip
of STRIP columns at a time, that part of the weight is packed into panels (`packing.py`): as many columns
as the registers hold, side by side for each k.  Then a panel is multiplied with all rows of the tile,
BLOCK rows at a time (`micro.py`); it is read one line after another, from the nearest cache, and `a`
where it stands.

With --compute bf16 (`bf16.py`) both factors are rounded on the way, `a` into a buffer of the worker's:
`rounds` where the numbers are multiplied as float32, `pairs` (the same bytes as uint32) where
the CPU multiplies pairs of bfloat16.  Numba leaves out the branches of the one that is None.
"""

import numpy as np

from mesp_np.ops import kernel
from mesp_np.ops.bf16 import pair, rounded
from mesp_np.ops.matmul import BLOCK, STRIP
from mesp_np.ops.micro import multiply_block
from mesp_np.ops.packing import pack, part
from mesp_np.ops.vectors import VECTOR_BYTES, VECTORS


@kernel
def multiply_tile(out, a, weight, turned, scratch, rounds, pairs, rows, columns, depth, add, scale):
    """The tile of out = a weight, or of out += scale a weight, with the summed axis in pieces of `depth`."""
    width, K = VECTORS * (VECTOR_BYTES // out.itemsize), a.shape[1]
    for k in range(0, K, depth):
        ks, deep = (k, min(k + depth, K)), min(depth, K - k)
        panels = scratch[:deep * STRIP].reshape(STRIP // width, deep, width)
        edge = scratch[deep * STRIP:deep * STRIP + BLOCK * width].reshape(BLOCK, width)
        scales = scratch[(deep + BLOCK) * STRIP:]
        if rounds is not None:
            _round_rows(rounds, a, rows, ks)
        if pairs is not None:
            _pair_rows(pairs, a, rows, ks)
        for first in range(columns[0], columns[1], STRIP):
            js = first, min(first + STRIP, columns[1])
            source = part(weight, scales, js, ks) if turned else part(weight, scales, ks, js)
            pack(panels, source, turned, js[1] - js[0])
            for j in range(js[0], js[1], width):
                panel, there = panels[(j - first) // width], (j, min(j + width, js[1]))
                if rounds is not None:
                    _round(panel)
                    _multiply_panel(out, rounds, rows[0], 0, panel, edge, rows, there, add or k > 0, scale)
                elif pairs is not None:
                    _multiply_panel(out, pairs, rows[0], 0, _pair(panel), edge, rows, there, add or k > 0, scale)
                else:
                    _multiply_panel(out, a, 0, k, panel, edge, rows, there, add or k > 0, scale)


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
                    out[i + r, j + c] += scale * edge[r, c]
                else:
                    out[i + r, j + c] = edge[r, c]


@kernel
def _round_rows(rounds, a, rows, ks):
    for i in range(rows[0], rows[1]):
        for k in range(ks[0], ks[1]):
            rounds[i - rows[0], k - ks[0]] = rounded(a[i, k])


@kernel
def _round(panel):
    for k in range(panel.shape[0]):
        for j in range(panel.shape[1]):
            panel[k, j] = rounded(panel[k, j])


@kernel
def _pair_rows(pairs, a, rows, ks):
    """pairs[i, p] holds a's numbers 2p and 2p + 1 of this piece; after an odd last one stands a zero."""
    for i in range(rows[0], rows[1]):
        for k in range(ks[0], ks[1] - 1, 2):
            pairs[i - rows[0], (k - ks[0]) // 2] = pair(a[i, k], a[i, k + 1])
        if (ks[1] - ks[0]) % 2:
            pairs[i - rows[0], (ks[1] - ks[0]) // 2] = pair(a[i, ks[1] - 1], a.dtype.type(0))


@kernel
def _pair(panel):
    """Two lines of the panel become one of pairs, in its first half: a line is written after it was read."""
    depth = panel.shape[0]
    pairs = panel.view(np.uint32)[:(depth + 1) // 2]
    for k in range(0, depth - 1, 2):
        for j in range(panel.shape[1]):
            pairs[k // 2, j] = pair(panel[k, j], panel[k + 1, j])
    if depth % 2:
        for j in range(panel.shape[1]):
            pairs[depth // 2, j] = pair(panel[depth - 1, j], panel.dtype.type(0))
    return pairs
