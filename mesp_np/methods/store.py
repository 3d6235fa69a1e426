"""store: plain backpropagation.  Every block's intermediates are kept at once.

The forward keeps what autograd keeps (`mebp.py` says why, tensor by tensor), in all L
blocks, until the backward has passed them.  Nothing is checkpointed and nothing is
computed twice: the fastest method, and the largest.

kept in a block: everything that has a name; the inputs x_l too, for their norm's backward

Live peak, in elements beyond `fixed` (see `methods/__init__.py`), LoRA on all seven
projections, update after the backward:

    kept = N*(2 + 3*D + 7*R + 2*Q + 2*KV + 4*F) + B*H*T*T
    held = max(L*(N*D + kept) + g, N*D + kept + L*g)
    loss = L*(N*D + kept) + N*D + head
    mlp = held + N*D + 2*N*KV + C*(F + R)
    attention = held + N*D + 2*N*KV + C*Q + W1*scores
    peak = max(loss, mlp, attention)

held: what is left of the L blocks while the gradients g of a block are formed one after
another.  mlp: in down_proj's backward of a tile, dact and dhd come on top.
"""

from mesp_np.methods.mebp import KEEP as AUTOGRAD

KEEP = AUTOGRAD
