"""Linear layer: each output feature is a weighted sum of the input features plus a bias.

Shapes    x, dx       : (N, I)    N rows, I input features
          out, dout   : (N, O)    O output features
          weight      : (O, I)    as checkpoints store it; any stored form when frozen
          bias        : (O,)

Forward   out_no = sum_i x_ni weight_oi + bias_o,  that is  out = x W^T + b

Backward  L depends on x_ni through out_no for every o, and d out_no / d x_ni = weight_oi, so
              dx_ni = sum_o dout_no weight_oi,          dx = dout W.
          It depends on weight_oi through row n for every n, and d out_no / d weight_oi = x_ni:
              dweight_oi = sum_n dout_no x_ni,          dW = dout^T x.
          The bias enters every row with factor one:
              dbias_o = sum_n dout_no.
          A frozen layer has no dW and no db, but it still has dx: gradients flow through
          frozen weights to what lies below.

          With --compute bf16 the inputs of these three products are rounded first (`bf16.py`).

Saved      x (N, I), only when the weight is trained; a frozen layer needs no input at all
Recomputed nothing
Cost       2 N I O FLOPs forward, the same for dx, the same again for dW

Source    Qwen2.5: q, k and v have biases, the other projections none.
"""

from mesp_np.ops import expect, kernel
from mesp_np.ops.matmul import multiply


def forward(team, out, x, weight, bias=None, plus=None):
    """out (N, O) = x (N, I) weight^T + bias, and the product `plus` (a, b, scale) if there is one (`lora.py`)."""
    _multiply(team, out, x, weight.T, plus=plus)
    if bias is not None:
        expect(out.shape[1:], bias=bias)
        team.rows(_add_bias, out, bias, flops=1)


def backward_input(team, dx, dout, weight, add=False, plus=None):
    """dx (N, I) = dout (N, O) weight, or dx += that; and the product `plus` (a, b, scale) if there is one."""
    _multiply(team, dx, dout, weight, add, plus)


def backward_weight(team, dweight, dout, x):
    """dweight (O, I) += dout^T x."""
    _multiply(team, dweight, dout.T, x, add=True)


def backward_bias(team, dbias, dout):
    """dbias (O,) += sum of dout over rows."""
    expect(dout.shape[1:], dbias=dbias)
    team.rows(_sum_rows, dbias, dout, width=dout.shape[0], flops=1)


def _multiply(team, out, a, b, add=False, plus=None):
    multiply(team, out, a, b, add=add, rounded=team.compute == "bf16", plus=plus)


@kernel
def _add_bias(out, bias, start, stop):
    for n in range(start, stop):
        for o in range(out.shape[1]):
            out[n, o] += bias[o]


@kernel
def _sum_rows(dbias, dout, start, stop):
    for n in range(dout.shape[0]):
        for o in range(start, stop):
            dbias[o] += dout[n, o]
