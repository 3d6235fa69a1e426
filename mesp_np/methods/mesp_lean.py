"""mesp-lean: the least that does not cost a second full forward.  Ours, beyond the paper.

The replay makes keys and values alone, which every tile needs of those before it.  All the rest is
built in the backward, a tile of rows at a time.  Every large product of the forward but down_proj's is
repeated once, as in the other methods' replays; norms and the small x A^T are formed again wherever they
are read, a quarter of a percent more work.  No tensor of all rows but k and v is ever made.
Bytes are for Qwen2.5-0.5B, B=1, T=256, r=8.

    tensor      shape           bytes   kept?  why
    x           (N, D)        917,504   yes    the checkpoint
    rstd1       (N,)            1,024   yes    a number a row: cheaper to keep than to reduce again
    k v         (N, K*E)      262,144   yes    a tile sees the keys of all rows before it
    xn1 xn2     (N, D)        917,504   no     one multiply per element
    q ctx mid   (N, D)      2,752,512   no     built when the backward comes to a tile
    p           (B,H,T,T)   3,670,016   no     formed again a row tile at a time: no (T, T) array
    gate up     (N, F)      9,961,472   no     as q, ctx and mid
    silu        (N, F)      4,980,736   no     formed in passing
    act         (N, F)      4,980,736   no     for dA of down only; freed before dact is made
    h (seven)   (N, R)         57,344   no     x A^T again

Live peak, in elements beyond `fixed` (see `methods/__init__.py`), LoRA on all seven
projections, update after the backward:

    kept = N*(1 + 2*KV)
    held = max(L*N*D + g, N*D + L*g)
    loss = L*N*D + N*D + head
    mlp = held + N*D + kept + 2*N*KV + C*(2*Q + D + 1 + 3*F + 2*R)
    attention = held + N*D + kept + 2*N*KV + 3*C*Q + W1*scores
    peak = max(loss, mlp, attention)

mlp: of a tile q, ctx, mid, rstd2, gate, up, act, hd and dhd.  attention: q, ctx and dctx.  Beside the checkpoints
only dx, k, v, dk and dv grow with N.
"""

KEEP = frozenset("rstd1 k v".split())
