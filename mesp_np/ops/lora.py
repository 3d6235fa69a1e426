"""LoRA: a low-rank correction beside a frozen linear layer.

Shapes    x, dx     : (N, I)     N rows, I input features
          out, dout : (N, O)     O output features
          A, dA     : (R, I)     R is the rank
          B, dB     : (O, R)
          h, dh     : (N, R)     the projection of x on the rank
          scale     : a number   alpha / R, or alpha / sqrt(R) with rank-stabilised LoRA

Forward   h = x A^T,                 h_nr   = sum_i x_ni A_ri
          out += scale h B^T,        out_no += scale sum_r h_nr B_or

Backward  out depends on h_nr with factor scale B_or and on B_or with factor scale h_nr:
              dh_nr = scale sum_o dout_no B_or,         dh = scale dout B
              dB_or = scale sum_n dout_no h_nr,         dB = scale dout^T h
          h depends on A_ri with factor x_ni and on x_ni with factor A_ri:
              dA_ri = sum_n dh_nr x_ni,                 dA = dh^T x
              dx_ni += sum_r dh_nr A_ri,                dx += dh A
          Only the order of the products matters for memory: dh is formed first, so
          nothing of shape (O, I) ever exists.

Saved      x (N, I) and h (N, R)
Recomputed h, by the forward's own product: 2 N I R FLOPs, about R / O of the layer's forward
Cost       2 N R (I + O) FLOPs forward, twice that backward

Source    Hu et al., LoRA, arXiv 2106.09685, section 4.1; names and orientation as in PEFT;
          rank-stabilised scale: Kalajdzievski, arXiv 2312.03732.
"""

from mesp_np.ops import expect
from mesp_np.ops.matmul import multiply


def project(team, h, x, A):
    """h (N, R) = x A^T."""
    multiply(team, h, x, A.T)


def added(h, B, scale):
    """The product scale h B^T that out (N, O) has beside the frozen layer's: `plus` for `linear.forward`."""
    return h, B.T, scale


def backward_hidden(team, dh, dout, B, scale):
    """dh (N, R) = scale dout B."""
    multiply(team, dh, dout, B, scale)


def backward_params(team, dA, dB, dh, dout, x, h, scale):
    """dA (R, I) += dh^T x and dB (O, R) += scale dout^T h."""
    expect((dh.shape[1], x.shape[1]), dA=dA)
    multiply(team, dA.T, x.T, dh, add=True)               # dh is packed, which is the smaller
    multiply(team, dB, dout.T, h, scale, add=True)


def backward_added(dh, A):
    """The product dh A that dx (N, I) has beside the frozen layer's: `plus` for `linear.backward_input`."""
    return dh, A, 1.0
