"""Matrix product in fixed tiles, with either factor transposed and weights in their stored form.

Shapes    out : (M, N)    a : (M, K)    b : (K, N), dense or a stored weight (`quant.py`)

Forward   out_mn  = sum_k a_mk b_kn             (add=False)
          out_mn += scale sum_k a_mk b_kn       (add=True)

Backward  With dout = dL/dout: da = dout b^T and db = a^T dout, since
          d out_mn / d a_mk = b_kn and d out_mn / d b_kn = a_mk.
          Both are products again, so every op calls `multiply` for its gradients too:
          a transposed factor is just a view.

Tiles     out is cut into tiles for the workers, K into pieces of about DEPTH, a tile into strips
          of STRIP columns.  A worker packs a piece of a strip of b (`packing.py`), straight from its stored
          form, and multiplies it with the tile's rows of a (`tiles.py`, `micro.py`).  A weight is
          never dense as a whole: a worker holds DEPTH * STRIP of its numbers.

Bits      Each out_mn is summed on its own, over k from first to last, piece by piece, and the pieces depend
          on K alone.  So a row's result does not depend on the other rows of the call, nor a
          column's on the other columns; nor does any on threads, BLAS, or the stored form of b.

Saved      a and b, by whoever calls
Recomputed nothing
Cost       2 M K N FLOPs

Source    the product by blocks of Goto and van de Geijn, Anatomy of high-performance matrix
          multiplication, 2008.
"""

import numpy as np

from mesp_np.ops import bf16, expect
from mesp_np.ops.quant import factor

ROWS, NARROW_ROWS, COLUMNS = 264, 132, 256      # of a tile at most; whole blocks
DEPTH, STRIP = 512, 64
BLOCK = 6                                       # rows of the output that are multiplied at once


def lend(team, weight_tile):
    """Give the team its scratch, (threads, scratch_elements)."""
    team.weight_tile = weight_tile


def scratch_elements(width, compute="full"):
    """Elements of one worker's scratch when K is `width` at most: a packed piece of b, with bf16 a rounded one of a."""
    depth = min(DEPTH, width)
    return _packed_elements(depth) + (ROWS * depth if compute == "bf16" else 0)


def _packed_elements(depth):
    """A strip's panels, a block of the output, and the scales and biases of a strip in groups of 32 numbers or more."""
    return (depth + BLOCK) * STRIP + 6 * depth + 2 * STRIP


def piece_depth(K):
    """Numbers of the summed axis in a piece: K in equal parts of at most DEPTH, each but the last a multiple of 32."""
    pieces = -(-K // DEPTH)
    return min(K, 32 * -(-K // (32 * pieces)))


def multiply(team, out, a, b, add=False, scale=1.0, rounded=False):
    """out = a b, or out += scale a b; `rounded`: of a and b rounded to bfloat16 (`bf16.py`).

    out (M, N), a (M, K), b (K, N); views are fine, and quick where out's rows are contiguous.
    `scale` goes with `add` only, and `rounded` with float32.
    """
    (M, K), N = a.shape, b.shape[1]
    expect((M, N), out=out)
    expect((K, N), b=b)
    rows, strips = (ROWS, -(-N // STRIP)) if N > STRIP else (NARROW_ROWS, 1)
    across, depth = min(strips, 4 * -(-N // (4 * COLUMNS))), piece_depth(K)
    turned, scale = b.strides[0] < b.strides[1], out.dtype.type(scale)

    def task(worker, tile):
        from mesp_np.ops.tiles import multiply_tile
        scratch, (i, j) = team.weight_tile[worker], divmod(tile, across)
        first, last = (-(-part * strips // across) * STRIP for part in (j, j + 1))      # the wider ones first
        tile = (i * rows, min(i * rows + rows, M)), (first, min(last, N))
        room = _room(scratch, depth) if rounded else None
        multiply_tile(out, a, factor(b.T if turned else b), turned, scratch, room, *tile, depth, add, scale)

    team.run(out, -(-M // rows) * across, task, flops=2 * M * K * N)


def _room(scratch, depth):
    """(ROWS, depth) for a rounded piece of a tile's rows; of uint32 for a back end that takes pairs."""
    start = _packed_elements(depth)
    room = scratch[start:start + ROWS * depth].reshape(ROWS, depth)
    return room if bf16.backend() == bf16.PLAIN else room.view(np.uint32)
