"""mesp-lean: the least that does not cost a second full forward.  Ours, beyond the paper.

The replay stops at attention.  What follows it is built in the backward, a tile of rows at
a time, from ctx and x: once, because nothing of it was built before.  So of the large
products the replay and the rebuilds together repeat those of one forward, but for down_proj's,
and q, k and v once more (7 % of a block of Qwen2.5-0.5B).
Bytes are for Qwen2.5-0.5B, B=1, T=256, r=8.

    tensor      shape           bytes   kept?  why
    x           (N, D)        917,504   yes    the checkpoint
    rstd1       (N,)            1,024   yes    a number a row: cheaper to keep than to reduce again
    xn1 xn2     (N, D)        917,504   no     one multiply per element
    q k v       (N, (H+2K)E) 1,179,648  no     three small products
    p           (B,H,T,T)   3,670,016   no     formed again a row tile at a time: no (T, T) array
    ctx         (N, H*E)      917,504   yes    else attention would run a third time
    mid rstd2   (N, D)        918,528   no     built from ctx and x when the backward comes to a tile
    gate up     (N, F)      9,961,472   no     likewise, from mid
    silu        (N, F)      4,980,736   no     formed in passing
    act         (N, F)      4,980,736   no     for dA of down only; freed before dact is made
    h (seven)   (N, R)         57,344   no     x A^T again

Live peak, in elements beyond `fixed` (see `methods/__init__.py`), LoRA on all seven
projections, update after the backward:

    kept = N*(1 + Q)
    held = max(L*N*D + g, N*D + L*g)
    loss = L*N*D + N*D + head
    mlp = held + N*D + kept + C*(D + 1 + 3*F + 2*R)
    attention = held + N*D + N + N*(2*Q + 4*KV) + tiles
    peak = max(loss, mlp, attention)

mlp: dx and what is kept, and of a tile of rows mid, rstd2, gate, up, act, hd and dhd; dgate and dup are
written over gate and up.  attention: of the kept only rstd1 is left; dctx is written over ctx, dq over q.
"""

KEEP = frozenset("rstd1 ctx".split())
