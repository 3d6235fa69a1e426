"""SwiGLU: a gated product, where one projection decides how much of the other passes.

Shapes    gate, up, silu, act, dact, dgate, dup : (N, F)

Forward   sig(g)  = 1 / (1 + exp(-g))
          silu_nf = gate_nf sig(gate_nf)
          act_nf  = silu_nf up_nf

Backward  act is linear in up and in silu:
              dup   = dact silu,           dsilu = dact up.
          For silu, sig' = sig (1 - sig), so by the product rule
              d silu / d gate = sig + gate sig (1 - sig) = sig (1 + gate (1 - sig)),
              dgate = dact up sig (1 + gate (1 - sig)).

Saved      gate, up (N, F) each
Recomputed sig and silu, in passing: one exponential per element; act when the layer above
           wants it, one more pass
In place   the backward writes dgate over gate and dup over up: each element is read before it is written
Cost       5 N F FLOPs forward, 10 N F backward, counting the exponential as one

The exponential is `rowmath.exp`, and silu is rounded to the array's dtype before
it is used, so act has the same bits whether or not silu was stored on the way.

Source    Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202, eq. 6.
"""


from mesp_np.ops import expect, kernel
from mesp_np.ops.rowmath import exp


def silu(team, out, gate):
    """out (N, F) = silu(gate)."""
    expect(out.shape, gate=gate)
    team.rows(_silu_rows, out, gate, flops=4)


def product(team, act, silu, up):
    """act (N, F) = silu * up, from a stored silu."""
    expect(act.shape, silu=silu, up=up)
    team.rows(_product_rows, act, silu, up, flops=1)


def forward(team, act, gate, up):
    """act (N, F) = silu(gate) * up, with no array for silu."""
    expect(act.shape, gate=gate, up=up)
    team.rows(_forward_rows, act, gate, up, flops=5)


def backward(team, gate, up, dact):
    """gate becomes dgate and up becomes dup (N, F)."""
    expect(gate.shape, up=up, dact=dact)
    team.rows(_backward_rows, gate, up, dact, flops=10)


@kernel
def _sigmoid(g):
    return type(g)(1) / (type(g)(1) + exp(-g))


@kernel
def _silu_rows(out, gate, start, stop):
    for n in range(start, stop):
        for f in range(out.shape[1]):
            out[n, f] = gate[n, f] * _sigmoid(gate[n, f])


@kernel
def _product_rows(act, silu, up, start, stop):
    for n in range(start, stop):
        for f in range(act.shape[1]):
            act[n, f] = silu[n, f] * up[n, f]


@kernel
def _forward_rows(act, gate, up, start, stop):
    for n in range(start, stop):
        for f in range(act.shape[1]):
            act[n, f] = gate[n, f] * _sigmoid(gate[n, f]) * up[n, f]


@kernel
def _backward_rows(gate, up, dact, start, stop):
    one = dact.dtype.type(1)
    for n in range(start, stop):
        for f in range(dact.shape[1]):
            g, u, d = gate[n, f], up[n, f], dact[n, f]
            sig = _sigmoid(g)
            up[n, f] = d * (g * sig)
            gate[n, f] = d * u * sig * (one + g * (one - sig))
