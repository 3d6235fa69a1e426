"""RMSNorm: scale each row to unit root-mean-square, then by a learned weight.

Shapes    x, out, dout, dx : (N, D)    N rows of width D
          weight, dweight  : (D,)
          rstd             : (N,)      reciprocal root-mean-square of a row

Forward   rstd_n = (mean_d x_nd^2 + eps)^(-1/2)
          out_nd = x_nd rstd_n weight_d

Backward  Write g = dout * weight (what reaches xhat = x * rstd).  x_nk enters its row of
          xhat directly and through rstd_n, and
              d rstd_n / d x_nk = -1/2 (mean x^2 + eps)^(-3/2) 2 x_nk / D = -rstd_n^3 x_nk / D,
          so  dx_nk = g_nk rstd_n + sum_j g_nj x_nj d rstd_n / d x_nk
                    = rstd_n (g_nk - xhat_nk mean_j(g_nj xhat_nj)).
          The weight scales every row:
              dweight_d = sum_n dout_nd xhat_nd.

Saved      rstd (N,)     one number a row: cheaper to keep than to reduce again
Recomputed xhat (N, D)   one multiply per element, inside the loop
Cost       4 N D FLOPs forward, 9 N D backward

Sums run in float64 and are rounded once, into the stored rstd; the rest goes on with
the stored value, so a later rebuild of out from x and rstd has the same bits.

Source    Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467, eq. 4.
"""

import math

from mesp_np.ops import expect, kernel


def statistics(team, rstd, x, eps):
    """rstd (N,) of the rows of x (N, D)."""
    expect(x.shape[:1], rstd=rstd)
    team.rows(_statistics, rstd, x, eps, width=x.shape[1], flops=2)


def forward(team, out, x, rstd, weight):
    """out (N, D) = x * rstd * weight, from stored statistics."""
    expect(out.shape, x=x)
    expect(out.shape[:1], rstd=rstd)
    expect(out.shape[1:], weight=weight)
    team.rows(_forward, out, x, rstd, weight, flops=2)


def backward(team, dx, dout, x, rstd, weight):
    """dx (N, D) += the gradient through the norm (the residual path is in dx already)."""
    expect(dx.shape, dout=dout, x=x)
    expect(dx.shape[:1], rstd=rstd)
    expect(dx.shape[1:], weight=weight)
    team.rows(_backward, dx, dout, x, rstd, weight, flops=9)


def backward_weight(team, dweight, dout, x, rstd):
    """dweight (D,) += sum over rows of dout * xhat."""
    expect(dout.shape, x=x)
    expect(dout.shape[:1], rstd=rstd)
    expect(dout.shape[1:], dweight=dweight)
    team.rows(_backward_weight, dweight, dout, x, rstd, width=x.shape[0], flops=3)


@kernel
def _statistics(rstd, x, eps, start, stop):
    for n in range(start, stop):
        total = 0.0
        for d in range(x.shape[1]):
            total += x[n, d] * x[n, d]
        rstd[n] = 1.0 / math.sqrt(total / x.shape[1] + eps)


@kernel
def _forward(out, x, rstd, weight, start, stop):
    for n in range(start, stop):
        for d in range(out.shape[1]):
            out[n, d] = x[n, d] * rstd[n] * weight[d]


@kernel
def _backward(dx, dout, x, rstd, weight, start, stop):
    D = x.shape[1]
    for n in range(start, stop):
        total = 0.0
        for d in range(D):
            total += dout[n, d] * weight[d] * (x[n, d] * rstd[n])
        mean = dx.dtype.type(total / D)
        for d in range(D):
            dx[n, d] += rstd[n] * (dout[n, d] * weight[d] - x[n, d] * rstd[n] * mean)


@kernel
def _backward_weight(dweight, dout, x, rstd, start, stop):
    for n in range(x.shape[0]):
        for d in range(start, stop):
            dweight[d] += dout[n, d] * x[n, d] * rstd[n]
