"""Fill: every element the same number; and a view of any array as one row of numbers.

Shapes    out : any

Forward   out_i = value

Backward  none: out depends on nothing

Saved      nothing
Recomputed nothing
Cost       no FLOPs

Source    gradients and running sums start at zero.
"""

from mesp_np.ops import kernel


def fill(team, out, value):
    """Every element of out = value."""
    team.rows(_fill, flat(out), out.dtype.type(value), flops=0)


def flat(array):
    """The array as one row of numbers; raises ValueError rather than copy."""
    return array.reshape(-1, copy=False)


@kernel
def _fill(out, value, start, stop):
    for i in range(start, stop):
        out[i] = value
