"""Causal grouped-query attention, in tiles of query rows.

Shapes    q, dq, ctx, dctx : (B*T, H*E)   H query heads of dimension E side by side
          k, v, dk, dv     : (B*S, K*E)   K key/value heads; query head h reads head h // G, G = H / K
          p                : (B, H, T, S) softmax probabilities, or None
          starts           : (B*T,)       the first key that each query sees
          T queries stand at the last T of S positions (S = T in training; S > T when
          earlier keys come from a cache), so query t sees keys starts_t <= s <= t + S - T.
          starts is 0 unless several texts are packed into a row: then it is where the
          query's own text begins, and no text sees another.

Forward   For each sequence and head, with alpha = E^(-1/2):
              a_ts   = alpha sum_e q_te k_se                     for starts_t <= s <= t + S - T
              p_ts   = exp(a_ts - max_s a_ts) / sum_s exp(...)   0 for the keys not seen
              ctx_te = sum_s p_ts v_se

Backward  ctx is linear in v and in p:
              dv_se = sum_t p_ts dctx_te             summed over the G heads that read v
              dp_ts = sum_e dctx_te v_se
          Softmax: d p_ts / d a_tj = p_ts (delta_sj - p_tj), hence
              da_ts = p_ts (dp_ts - sum_j dp_tj p_tj)
          (keys not seen have p = 0 and so da = 0: the mask needs no gradient of its own).
          a is bilinear in q and k:
              dq_te = alpha sum_s da_ts k_se
              dk_se = alpha sum_t da_ts q_te         summed over the G heads that read k

Saved      q, k, v, and p if it is kept: B H T S numbers, the block's largest tensor when T is long
Recomputed without p: a row tile of p at a time from q and k, by the forward's own calls, so
           nothing of shape (T, S) exists; five products in the backward instead of four
Cost       4 B H T S E FLOPs forward and 8 backward, about half of it skipped as masked

Tiles     TILE query rows at a time, and fewer, down to 16, when there are so many keys that a tile would hold
          more than SCORES numbers: up to S = SCORES / 16 scratch grows by S E numbers alone.  A tile
          multiplies only with the keys up to its last row; the tiles above the diagonal are never formed.
          (Keys before starts are: what is computed depends on shapes, never on the data, so that a
          plan can count it.)  With p kept, tiles are written into p; else into a worker's scratch: the
          same calls on the same shapes, so the same bits.  The backward runs over (sequence, key/value
          head): the sums over t and over the G heads then have one author and one order.

Source    Vaswani et al., arXiv 1706.03762, eq. 1; grouped heads: Ainslie et al., arXiv
          2305.13245; scale, mask and head order as in transformers' Qwen2.
"""

import numpy as np

from mesp_np.ops import ShapeError, expect, kernel
from mesp_np.ops.rowmath import exp, largest, total

TILE, SCORES = 128, 1 << 18      # query rows and numbers of a tile, at most


def forward_scratch(T, S):
    """Elements of one worker's scratch in `forward`: a tile of probabilities."""
    return _tile_rows(T, S) * S


def backward_scratch(T, S, E):
    """Elements of one worker's scratch in `backward`: tiles of p and da, and a product for dk and dv."""
    return 2 * _tile_rows(T, S) * S + S * E


def probabilities(team, p, q, k, starts):
    """p (B, H, T, S) from q (B*T, H*E) and k (B*S, K*E); zero for the keys not seen."""
    B, H, T, S = p.shape
    q, k, _ = _heads(p.shape, q, k, k)
    starts = _starts(starts, B, T)

    def task(_, tile):
        b, h = divmod(tile, H)
        for rows, seen in _row_tiles(T, S):
            p[b, h, rows, seen:] = 0
            _probability_tile(p[b, h, rows, :seen], q[b, rows, h], k[b, :seen, _group(h, q, k)], starts[b, rows])

    team.run(p, B * H, task, flops=_flops(B, H, T, S, q.shape[-1], 1))


def context(team, ctx, p, v):
    """ctx (B*T, H*E) = p v, from whole probabilities p (B, H, T, S)."""
    B, H, T, S = p.shape
    ctx4, v, _ = _heads(p.shape, ctx, v, v)

    def task(_, tile):
        b, h = divmod(tile, H)
        for rows, seen in _row_tiles(T, S):
            np.matmul(p[b, h, rows, :seen], v[b, :seen, _group(h, ctx4, v)], out=ctx4[b, rows, h])

    team.run(ctx, B * H, task, flops=_flops(B, H, T, S, v.shape[-1], 1))


def forward(team, ctx, q, k, v, starts, shape, scratch):
    """ctx (B*T, H*E) with probabilities only a tile at a time.

    shape    (B, H, T, S)
    scratch  (threads, forward_scratch(T, S))
    """
    B, H, T, S = shape
    expect(q.shape, ctx=ctx)
    _expect_room(scratch, team.threads, forward_scratch(T, S))
    q, k, v = _heads(shape, q, k, v)
    starts = _starts(starts, B, T)
    ctx4 = ctx.reshape(q.shape, copy=False)

    def task(worker, tile):
        b, h = divmod(tile, H)
        g = _group(h, q, k)
        for rows, seen in _row_tiles(T, S):
            count = rows.stop - rows.start
            p = scratch[worker, :count * seen].reshape(count, seen)
            _probability_tile(p, q[b, rows, h], k[b, :seen, g], starts[b, rows])
            np.matmul(p, v[b, :seen, g], out=ctx4[b, rows, h])

    team.run(ctx, B * H, task, flops=_flops(B, H, T, S, q.shape[-1], 2))


def backward(team, dq, dk, dv, dctx, q, k, v, p, starts, shape, scratch):
    """dq from dctx, and dk, dv += theirs; p (B, H, T, S), or None to form it again tile by tile.

    dq may be q itself.

    shape    (B, H, T, S)
    scratch  (threads, backward_scratch(T, S, E))
    """
    B, H, T, S = shape
    expect(q.shape, dq=dq, dctx=dctx)
    expect(k.shape, dk=dk, dv=dv)
    expect(shape, p=p)
    dq, dk, dv = _heads(shape, dq, dk, dv)
    q, k, v = _heads(shape, q, k, v)
    starts = _starts(starts, B, T)
    dctx = dctx.reshape(q.shape, copy=False)
    K, E = k.shape[2:]
    _expect_room(scratch, team.threads, backward_scratch(T, S, E))

    def task(worker, tile):
        b, g = divmod(tile, K)
        for h in range(g * H // K, (g + 1) * H // K):
            for rows, seen in _row_tiles(T, S):
                gradients = dq[b, rows, h], dk[b, :seen, g], dv[b, :seen, g]
                inputs = dctx[b, rows, h], q[b, rows, h], k[b, :seen, g], v[b, :seen, g]
                tile_p = None if p is None else p[b, h, rows, :seen]
                _backward_tile(*gradients, *inputs, tile_p, starts[b, rows], scratch[worker])

    team.run(dq, B * K, task, flops=_flops(B, H, T, S, E, 4 if p is not None else 5))


def _backward_tile(dq, dk, dv, dctx, q, k, v, p, starts, scratch):
    """dq, and additions to dk and dv, for one head's row tile and the keys it sees."""
    size, (seen, E) = len(q) * len(k), k.shape
    da, scratch = scratch[:size].reshape(len(q), seen), scratch[size:]
    product, scratch = scratch[:seen * E].reshape(seen, E), scratch[seen * E:]
    if p is None:
        p = scratch[:size].reshape(len(q), seen)
        _probability_tile(p, q, k, starts)
    np.matmul(p.T, dctx, out=product)
    _add(dv, product)
    np.matmul(dctx, v.T, out=da)
    _softmax_backward(da, p, _alpha(q))
    np.matmul(da.T, q, out=product)
    _add(dk, product)
    np.matmul(da, k, out=dq)                 # last: dq may be q


def _heads(shape, q, k, v):
    """q as (B, T, H, E), k and v as (B, S, K, E); raises ShapeError when they do not fit `shape`."""
    B, H, T, S = shape
    E = q.shape[1] // H
    K = k.shape[1] // E
    if q.shape != (B * T, H * E) or k.shape != (B * S, K * E) or H % K or S < T:
        raise ShapeError(f"q {q.shape} and k {k.shape} do not fit B, H, T, S = {shape}")
    expect(k.shape, v=v)
    return (q.reshape(B, T, H, E, copy=False), k.reshape(B, S, K, E, copy=False), v.reshape(B, S, K, E, copy=False))


def _starts(starts, B, T):
    expect((B * T,), starts=starts)
    return starts.reshape(B, T, copy=False)


def _expect_room(scratch, threads, size):
    if scratch.shape[0] < threads or scratch.shape[1] < size:
        raise ShapeError(f"scratch has shape {scratch.shape}, at least {(threads, size)} is needed")


def _group(h, q, k):
    """The key/value head that query head h reads."""
    return h * k.shape[2] // q.shape[2]


def _row_tiles(T, S):
    """(slice of query rows, number of keys the last of them sees), top to bottom."""
    size = _tile_rows(T, S)
    for start in range(0, T, size):
        stop = min(T, start + size)
        yield slice(start, stop), stop + S - T


def _tile_rows(T, S):
    """Query rows of a tile: in sixteens where SCORES decides."""
    return min(T, TILE, max(16, SCORES // S // 16 * 16))


def _probability_tile(p, q_rows, keys, starts):
    np.matmul(q_rows, keys.T, out=p)
    _softmax(p, _alpha(q_rows), starts)


def _alpha(q):
    return q.dtype.type(q.shape[-1] ** -0.5)


def _flops(B, H, T, S, E, products):
    """2 E FLOPs for each score that is formed, in each of so many products."""
    return 2 * E * products * B * H * sum((rows.stop - rows.start) * seen for rows, seen in _row_tiles(T, S))


@kernel
def _softmax(p, alpha, starts):
    """Scores to probabilities in place; the last row sees columns up to the last, each row above one less."""
    rows, columns = p.shape
    for t in range(rows):
        first, stop = starts[t], columns - rows + t + 1
        row = p[t, first:stop]
        top = largest(row)
        for s in range(len(row)):
            row[s] = exp(alpha * (row[s] - top))
        inverse = p.dtype.type(1.0 / total(row))
        for s in range(len(row)):
            row[s] *= inverse
        p[t, :first] = 0
        p[t, stop:] = 0


@kernel
def _softmax_backward(dp, p, alpha):
    """dp becomes alpha da, in place."""
    for t in range(dp.shape[0]):
        total = 0.0
        for s in range(dp.shape[1]):
            total += dp[t, s] * p[t, s]
        mean = dp.dtype.type(total)
        for s in range(dp.shape[1]):
            dp[t, s] = alpha * (p[t, s] * (dp[t, s] - mean))


@kernel
def _add(out, x):
    for s in range(out.shape[0]):
        for e in range(out.shape[1]):
            out[s, e] += x[s, e]
