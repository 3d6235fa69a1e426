"""Dropout: leave out some numbers, make up for them with the rest, and store no mask.

Shapes    x, out, dx, dout : (C, I)    rows first, first + 1, ... of N
          key              : 64 bits, another for each layer, projection, batch and step
          rate             : a number in [0, 1)

Forward   out_ni = m_ni x_ni,    m_ni = 1 / (1 - rate) where u_ni >= rate, else 0

          u_ni is uniform on [0, 1) and a function of (key, n I + i) alone (the counter of
          `noise.py`): E[m] = 1, and the mask is the same whenever, by whomever and in
          whatever pieces it is formed.

Backward  out is linear in x, the mask being a constant:    dx_ni = m_ni dout_ni

Saved      8 bytes of key
Recomputed the mask, a few integer operations a number
Cost       N I FLOPs either way

Source    Srivastava et al., 2014, in the inverted form; on an adapter's input alone: PEFT's
          lora_dropout.
"""

from mesp_np.ops import expect, kernel
from mesp_np.ops.noise import uniform


def forward(team, out, x, key, rate, first=0):
    """out = the mask of this key times x, whose rows count from `first`; out may be x."""
    expect(out.shape, x=x)
    team.rows(_drop, out, x, key, first, rate, out.dtype.type(1 / (1 - rate)), flops=1)


def backward(team, dx, dout, key, rate, first=0):
    """dx (C, I) += the mask of this key times dout."""
    expect(dx.shape, dout=dout)
    team.rows(_add_dropped, dx, dout, key, first, rate, dx.dtype.type(1 / (1 - rate)), flops=2)


@kernel
def _drop(out, x, key, first, rate, scale, start, stop):
    for n in range(start, stop):
        for i in range(out.shape[1]):
            kept = uniform(key, (first + n) * out.shape[1] + i) >= rate
            out[n, i] = scale * x[n, i] if kept else out.dtype.type(0)


@kernel
def _add_dropped(dx, dout, key, first, rate, scale, start, stop):
    for n in range(start, stop):
        for i in range(dx.shape[1]):
            if uniform(key, (first + n) * dx.shape[1] + i) >= rate:
                dx[n, i] += scale * dout[n, i]
