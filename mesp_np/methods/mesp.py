"""MeSP: block checkpoints, and within a block the paper's eight tensors.

A hand-written backward needs fewer tensors than an automatic one, because it can rebuild
the cheap ones.  Bytes are for Qwen2.5-0.5B, B=1, T=256, r=8.

    tensor      shape           bytes   kept?  why
    x           (N, D)        917,504   yes    the checkpoint; norm 1's derivative
    rstd1       (N,)            1,024   no     reduced again from x
    xn1         (N, D)        917,504   yes    dA of q, k, v; and q, k, v are rebuilt from it
    q k v       (N, (H+2K)E) 1,179,648  no     three small products with xn1
    p           (B,H,T,T)   3,670,016   yes    softmax's derivative, dv
    ctx         (N, H*E)      917,504   yes    dA of o
    mid         (N, D)        917,504   yes    norm 2's derivative
    rstd2       (N,)            1,024   no     reduced again from mid
    xn2         (N, D)        917,504   yes    dA of gate and up
    gate up     (N, F)      9,961,472   yes    silu's derivative and the product's
    silu        (N, F)      4,980,736   no     formed in passing, never an array
    act         (N, F)      4,980,736   no     silu(gate) * up, for dA of down only
    h (seven)   (N, R)         57,344   no     x A^T again

The rebuilt q and k carry their bias and their rotation: both enter the softmax's
derivative (the released device code leaves both out).

Live peak, in elements beyond `fixed` (see `methods/__init__.py`), LoRA on all seven
projections, update after the backward:

    kept = N*(3*D + Q + 2*F) + B*H*T*T
    held = max(L*N*D + g, N*D + L*g)
    loss = L*N*D + N*D + head
    mlp = held + N*D + kept + 4*N*KV + C*(F + 2*R + 1)
    attention = held + N*D + kept + 4*N*KV + 2*C*Q + W1*scores
    peak = max(loss, mlp, attention)

mlp: of a tile, the rebuilt rstd2, act and hd, and dhd, come on top.  attention: the rebuilt q, over which dq
is written, and dctx.

Source    arXiv 2602.13069 (the method and its list of eight); the backward is derived in ops/.
"""

KEEP = frozenset("xn1 p ctx mid xn2 gate up".split())
