"""Matrix product in fixed tiles, with either factor transposed and weights in their stored form.

Shapes    out : (M, N)    a : (M, K)    b : (K, N), dense or a stored weight (`quant.py`)

Forward   out_mn  = sum_k a_mk b_kn             (add=False)
          out_mn += scale sum_k a_mk b_kn       (add=True)

Backward  With dout = dL/dout: da = dout b^T and db = a^T dout, since
          d out_mn / d a_mk = b_kn and d out_mn / d b_kn = a_mk.
          Both are products again, so every op calls `multiply` for its gradients too:
          a transposed factor is just a view.

Tiles     out is cut into tiles of ROWS rows and at most COLUMNS columns, of equal width and in
          fours where there are many, so that two or four workers share them evenly; K is cut
          into pieces of DEPTH.  For each tile a worker makes one piece of b dense in its own buffer (nothing to do when
          it is dense already), multiplies at once, and adds up the pieces in order.
          A weight is never dense as a whole: a tile costs DEPTH * COLUMNS elements.
          The cuts depend on (M, K, N) alone: the same bits for any number of threads.

Saved      a and b, by whoever calls
Recomputed nothing
Cost       2 M K N FLOPs

Source    each tile is a gemm of BLAS level 3 (Dongarra et al., 1990), through NumPy.
"""

import numpy as np

from mesp_np.ops import expect, kernel
from mesp_np.ops.quant import dense

ROWS, COLUMNS, DEPTH = 256, 256, 1024


def lend(team, weight_tile, product_tile):
    """Give the team its scratch: (threads, scratch_elements[0]) and (threads, scratch_elements[1])."""
    team.weight_tile, team.product_tile = weight_tile, product_tile


def scratch_elements(rows, width):
    """Elements of one worker's weight tile and product tile, when no array is larger than this."""
    columns = min(COLUMNS, width)
    return min(DEPTH, width) * columns, min(ROWS, rows) * columns


def tile_width(N):
    """Columns of a tile of an output N wide: at most COLUMNS, a multiple of 8."""
    tiles = 4 * -(-N // (4 * COLUMNS)) if N > 2 * COLUMNS else -(-N // COLUMNS)
    return 8 * -(-N // (8 * tiles))


def multiply(team, out, a, b, add=False, scale=1.0):
    """out = a b, or out += scale a b.

    out (M, N), a (M, K), b (K, N); views are fine, out's rows must be contiguous.  `scale`
    goes with `add` only.
    """
    (M, K), N = a.shape, b.shape[1]
    expect((M, N), out=out)
    expect((K, N), b=b)
    width = tile_width(N)
    across = -(-N // width)
    scale = out.dtype.type(scale)

    def task(worker, tile):
        i, j = tile // across * ROWS, tile % across * width
        part = out[i:i + ROWS, j:j + width]
        for k in range(0, K, DEPTH):
            piece = b[k:k + DEPTH, j:j + width]
            if piece.dtype != out.dtype:
                piece = dense(piece, team.weight_tile[worker])
            if k == 0 and not add:
                np.matmul(a[i:i + ROWS, :DEPTH], piece, out=part)
            else:
                product = team.product_tile[worker, :part.size].reshape(part.shape)
                np.matmul(a[i:i + ROWS, k:k + DEPTH], piece, out=product)
                _accumulate(part, product, scale)

    team.run(out, -(-M // ROWS) * across, task, flops=2 * M * K * N)


@kernel
def _accumulate(out, product, scale):
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] += scale * product[i, j]
