"""Residual connection: a branch adds to the stream it was read from.

Shapes    out, x : (N, D)

Forward   out_nd += x_nd,  where out already holds the branch: out = branch(x) + x

Backward  Both summands have factor one, so dout reaches each unchanged:
              dbranch = dout,    dx = dout + (what comes back through the branch).
          The code does it without a copy: the branch's backward *adds* to the array
          that holds dout, and that array then is dx.

Saved      nothing
Recomputed nothing
Cost       N D FLOPs forward, none backward

Source    He et al., Deep Residual Learning, arXiv 1512.03385, eq. 1.
"""


from mesp_np.ops import expect, kernel


def forward(team, out, x):
    """out (N, D) += x."""
    expect(out.shape, x=x)
    team.rows(_add, out, x, flops=1)


@kernel
def _add(out, x, start, stop):
    for n in range(start, stop):
        for d in range(out.shape[1]):
            out[n, d] += x[n, d]
