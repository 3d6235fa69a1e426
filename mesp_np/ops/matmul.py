"""Matrix product in fixed tiles, with either factor transposed and weights in their stored form.

Shapes    out : (M, N)    a : (M, K)    b : (K, N), dense or a stored weight (`quant.py`)

Forward   out_mn  = scale sum_k a_mk b_kn       (add=False)
          out_mn += scale sum_k a_mk b_kn       (add=True)
          and then, where a second product is given, out_mn += its scale sum_k a'_mk b'_kn

Backward  With dout = dL/dout: da = dout b^T and db = a^T dout, since
          d out_mn / d a_mk = b_kn and d out_mn / d b_kn = a_mk.
          Both are products again, so every op calls `multiply` for its gradients too:
          a transposed factor is just a view.

Tiles     out is cut into tiles for the workers, K into pieces of about DEPTH, a tile into strips
          of STRIP columns.  A worker packs a piece of a strip of b (`packing.py`), straight from its stored
          form, and multiplies it with the tile's rows of a (`tiles.py`, `micro.py`).  A weight is
          never dense as a whole: a worker holds DEPTH * STRIP of its numbers.  A second product is added
          to a tile right after the first, while the tile is near: a product with few k, as an adapter's,
          would spend its time on reading out and writing it again.

Bits      Each out_mn is summed on its own, over k from first to last, piece by piece, and the pieces depend
          on K alone.  So a row's result does not depend on the other rows of the call, nor a
          column's on the other columns; nor does any on threads, BLAS, or the stored form of b.

Saved      a and b, by whoever calls
Recomputed nothing
Cost       2 M K N FLOPs

Source    the product by blocks of Goto and van de Geijn, Anatomy of high-performance matrix
          multiplication, 2008.
"""

import math
from functools import cache, cached_property

import numpy as np

from mesp_np.ops import ShapeError, bf16, expect
from mesp_np.ops.quant import factor

ROWS, NARROW_ROWS = 256, 132                    # of a tile at most
STRIPS, ROUNDED_STRIPS = 4, 16                  # of a tile at most; each tile rounds its rows of a, if it must
DEPTH, STRIP = 512, 64
BLOCK = 6                                       # rows of the output that are multiplied at once


def lend(team, weight_tile):
    """Give the team its scratch, (threads, scratch_elements)."""
    team.weight_tile = weight_tile


def scratch_elements(compute="full"):
    """Elements of one worker's scratch: a packed piece of b, with bf16 a rounded one of a."""
    return _packed_elements(DEPTH) + (ROWS * DEPTH if compute == "bf16" else 0)


def _packed_elements(depth):
    """A strip's panels, a block of the output, and the scales and biases of a strip in groups of 32 numbers or more."""
    depth = 32 * -(-depth // 32)                    # whole blocks of pairs, and lines of the cache
    return (depth + BLOCK) * STRIP + 6 * depth + 2 * STRIP


def piece_depth(K):
    """Numbers of the summed axis in a piece: K in equal parts of at most DEPTH, each but the last a multiple of 32."""
    pieces = -(-K // DEPTH)
    return min(K, 32 * -(-K // (32 * pieces)))


def multiply(team, out, a, b, scale=1.0, add=False, rounded=False, plus=None):
    """out = scale a b, or out += scale a b; `rounded`: of a and b rounded to bfloat16 (`bf16.py`).

    out (M, N), a (M, K), b (K, N); views are fine, and quick where out's rows are contiguous.
    `plus` is a second product (a', b', scale'), never rounded, which is added.  `rounded` goes with float32 only.
    Raises ShapeError when the shapes do not fit together, or K is 0, TypeError when a and out are of two dtypes.
    """
    M, N = out.shape
    products = [_Product(out, a, b, scale, add, rounded)] + ([_Product(out, *plus, True)] if plus else [])
    rows, edges = ROWS if N > STRIP else NARROW_ROWS, _edges(N, ROUNDED_STRIPS, 2) if rounded else _edges(N, STRIPS, 4)
    across = len(edges) - 1

    def task(worker, tile):
        i, j = divmod(tile, across)
        for product in products:
            product.tile(team.weight_tile[worker], (i * rows, min(i * rows + rows, M)), (edges[j], edges[j + 1]))

    team.run(out, -(-M // rows) * across, task, flops=sum(product.flops for product in products))


class _Product:
    """out = scale a b, or out += scale a b, ready to be worked out for one tile after another."""

    def __init__(self, out, a, b, scale, add, rounded=False):
        (M, K), N = a.shape, b.shape[1]
        expect((M, N), out=out)
        expect((K, N), b=b)
        if not K:
            raise ShapeError(f"a has shape {a.shape}: nothing to sum")
        if a.dtype != out.dtype:
            raise TypeError(f"a is {a.dtype}, out {out.dtype}")
        self.out, self.a, self.b, self.rounded = out, a, b, rounded
        self.flops, self.depth, self.add, self.scale = 2 * M * K * N, piece_depth(K), add, out.dtype.type(scale)

    @cached_property
    def weight(self):
        """(what `factor` makes of b, whether b is stored turned); not for a phantom."""
        turned = self.b.strides[0] < self.b.strides[1]
        return factor(self.b.T if turned else self.b), turned

    def tile(self, scratch, rows, columns):
        """The tile, with the worker's scratch."""
        from mesp_np.ops.tiles import multiply_tile
        room = _room(scratch, self.depth) if self.rounded else None
        multiply_tile(self.out, self.a, *self.weight, scratch, room, rows, columns, self.depth, self.add, self.scale)


@cache
def _edges(N, most, part):
    """Where N columns are cut: tiles of `most` strips, then of 1 in `part` of those left: workers end together."""
    edges = [0]
    while edges[-1] < N:
        left = -(-(N - edges[-1]) // STRIP)
        edges.append(min(N, edges[-1] + STRIP * min(most, -(-left // part))))
    return edges


def _room(scratch, depth):
    """For a rounded piece of a tile's rows, as the back end takes it: (ROWS, depth), of float32 or of uint32 for
    pairs, or blocks (ROWS / 16, depth / 32, 16, 16) of pairs."""
    start = _packed_elements(depth)
    if bf16.backend() == bf16.TILES:
        blocks = ROWS // 16, -(-depth // 32)
        return scratch[start:start + 256 * math.prod(blocks)].view(np.uint32).reshape(*blocks, 16, 16)
    room = scratch[start:start + ROWS * depth].reshape(ROWS, depth)
    return room if bf16.backend() == bf16.PLAIN else room.view(np.uint32)
