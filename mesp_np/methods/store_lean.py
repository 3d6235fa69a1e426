"""store-lean: plain backpropagation that keeps only what a large product would have to make again.

Nothing is checkpointed or replayed; each block keeps what its backward reads, but for what is
formed from other kept tensors in passing.  So it does the work of `store` at about half its bytes: at
T = 128, 256 and 1024 at 0.54, 0.49 and 0.35 of them.
Bytes are for Qwen2.5-0.5B, B=1, T=256, r=8, in each of the L blocks.

    tensor      shape           bytes   kept?  why
    x           (N, D)        917,504   yes    norm 1's derivative
    rstd1 rstd2 (N,)            1,024   yes    a number a row
    xn1 xn2     (N, D)        917,504   no     one multiply per element
    q k v       (N, (H+2K)E) 1,179,648  yes    three products
    p           (B,H,T,T)   3,670,016   no     formed again a row tile at a time, from q and k
    ctx         (N, H*E)      917,504   yes    attention's forward
    mid         (N, D)        917,504   yes    o_proj's product
    gate up     (N, F)      9,961,472   yes    the largest products of the block
    silu act    (N, F)      4,980,736   no     formed in passing; one more pass for dA of down
    h (seven)   (N, R)         57,344   yes    little, and a product each

`--stored-layers n` keeps this set in the last n layers of a checkpointed method: they are the first that
the backward comes to, so what they keep is gone before a replay adds to it.

Live peak, in elements beyond `fixed` (see `methods/__init__.py`), LoRA on all seven
projections, update after the backward:

    kept = N*(2 + D + 7*R + 2*Q + 2*KV + 2*F)
    held = max(L*(N*D + kept) + g, N*D + kept + L*g)
    loss = L*(N*D + kept) + N*D + head
    mlp = held + N*D + 2*N*KV + C*(F + R)
    attention = held + N*D + 2*N*KV + C*Q + W1*scores
    peak = max(loss, mlp, attention)

held: what is left of the L blocks while the gradients g of a block are formed one after
another.  mlp: in down_proj's backward of a tile, act and then dact, and dhd.
"""

KEEP = frozenset("rstd1 hq hk hv q k v ctx ho mid rstd2 hg hu gate up hd".split())
