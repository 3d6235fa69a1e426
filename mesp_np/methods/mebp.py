"""MeBP: block checkpoints, and within a block what autograd keeps.

Only the L block inputs are held through the forward.  The backward replays one block at
a time and keeps, until that block is done, every tensor that an automatic derivative of
its forward holds on to.

kept in a block: everything that has a name.  Bytes are for Qwen2.5-0.5B, B=1, T=256, r=8.

    tensor      shape       bytes each  why autograd holds it
    x           (N, D)         917,504  factor in norm 1's derivative (the checkpoint itself)
    rstd1       (N, 1)           1,024  factor in norm 1's derivative
    xn1         (N, D)         917,504  dA of q, k and v is dh^T xn1
    hq hk hv    (N, R)           8,192  dB is dout^T h
    q           (N, H*E)       917,504  dk = da^T q
    k           (N, K*E)       131,072  dq = da k         (autograd holds it repeated to H heads)
    v           (N, K*E)       131,072  dp = dctx v^T     (likewise)
    p           (B,H,T,T)    3,670,016  softmax's derivative is written in its output; dv = p^T dctx
    ctx         (N, H*E)       917,504  dA of o
    ho          (N, R)           8,192  dB of o
    mid         (N, D)         917,504  factor in norm 2's derivative
    rstd2       (N, 1)           1,024  factor in norm 2's derivative
    xn2         (N, D)         917,504  dA of gate and up
    hg hu       (N, R)           8,192  dB of gate and up
    gate        (N, F)       4,980,736  silu's derivative is written in its input
    up          (N, F)       4,980,736  the product's derivative: dsilu = dact up
    silu        (N, F)       4,980,736  the product's derivative: dup = dact silu
    act         (N, F)       4,980,736  dA of down
    hd          (N, R)           8,192  dB of down

The list was checked against what PyTorch saves for this block (tests/test_autograd_list.py).
Two differences: autograd's k and v are repeated to all query heads before the product
(here they are read through the group index), and cos and sin are saved by every layer but
shared by all, so they are counted once, as inputs.  Our own swiglu backward forms silu
again in passing and does not read the kept one; it is held as long as autograd holds it.

Live peak, in elements beyond `fixed` (see `methods/__init__.py`), LoRA on all seven
projections, update after the backward:

    kept = N*(2 + 3*D + 7*R + 2*Q + 2*KV + 4*F) + B*H*T*T
    held = max(L*N*D + g, N*D + L*g)
    loss = L*N*D + N*D + head
    mlp = held + N*D + kept + 2*N*KV + C*(F + R)
    attention = held + N*D + kept + 2*N*KV + C*Q + W1*scores
    peak = max(loss, mlp, attention)

held: the checkpoints that are left and the gradients formed so far.  mlp: in down_proj's
backward of a tile, dact and dhd come on top; all that is kept stays until the last tile.

Source    Song and Tang, Memory-Efficient Backpropagation for Fine-Tuning LLMs on
          Resource-Constrained Mobile Devices, arXiv 2510.03425.
"""

KEEP = frozenset("rstd1 xn1 hq hk hv q k v p ctx ho mid rstd2 xn2 hg hu gate up silu act hd".split())
