"""mesp-store-h: MeSP's eight tensors and the seven LoRA projections h.

The ablation of the MeSP paper: what is h = x A^T worth?  Bytes are for Qwen2.5-0.5B,
B=1, T=256, r=8: seven tensors (N, R) of 8,192 bytes, 57,344 in all, against one product of
2 N I R FLOPs each to form them again.

    tensor      shape           bytes   kept?  why
    the eight of `mesp.py`               yes   as there
    hq hk hv ho hg hu hd  (N, R)  8,192  yes   dB = dout^T h without forming h again

Live peak, in elements beyond `fixed` (see `methods/__init__.py`), LoRA on all seven
projections, update after the backward:

    kept = N*(3*D + Q + 2*F + 7*R) + B*H*T*T
    held = max(L*N*D + g, N*D + L*g)
    loss = L*N*D + N*D + head
    mlp = held + N*D + kept + 4*N*KV + C*(F + R + 1)
    attention = held + N*D + kept + 4*N*KV + 2*C*Q + W1*scores
    peak = max(loss, mlp, attention)

Against `mesp` the peak in the MLP is 7 N R - C R elements higher: hd of the tile is live there in both.
"""

from mesp_np.methods.mesp import KEEP as EIGHT

KEEP = EIGHT | frozenset("hq hk hv ho hg hu hd".split())
