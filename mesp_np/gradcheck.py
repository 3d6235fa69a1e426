"""Gradient check: is the derivative on paper the slope of the code?

Move an input a little and see how the result moves.  Along a direction v the slope of f
at x is, up to an error of order h^4,
    (8 (f(x + hv) - f(x - hv)) - (f(x + 2hv) - f(x - 2hv))) / 12h,
and a correct backward has it equal to sum_i gradient_i v_i.

Directional (the default): three random v per input, twelve evaluations whatever the size.
    An element that is wrong shows along almost every direction.
Exhaustive: v is each element's own direction in turn, which tells the element that is wrong.

The step is h = 1e-4 times the input's root-mean-square: rounding (1e-16 / h) is near 1e-12 and the
stencil's own error (h^4) below it even for a deep, sharp function.  That takes float64, so the kernels run
in float64: the same source, compiled again.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from mesp_np.op_cases import OP_CASES
from mesp_np.ops import matmul
from mesp_np.team import Team

STEP = 1e-4
DIRECTIONS = 3
FLOOR = 1e-2            # an error is relative to at least this part of a typical slope
OP_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Check:
    """What came out for one input.

    max_relative_error  the largest |numeric - analytic| / max(|numeric|, |analytic|, floor), where
                        floor = FLOOR rms(gradient) |v|, or 1 if the gradient is all zero;
                        infinite when something is not finite
    where               the direction or element where it was found, and both slopes there
    """

    name: str
    max_relative_error: float
    tolerance: float
    where: str

    @property
    def passed(self):
        return self.max_relative_error <= self.tolerance


def check_ops(exhaustive=False, seed=0, only=""):
    """The checks of every op case whose name starts with `only`."""
    with equipped_team() as team:
        return [check for case in OP_CASES if case.name.startswith(only)
                for check in check_op(team, case, exhaustive, np.random.default_rng(seed))]


def check_op(team, case, exhaustive, rng):
    """One Check per input of an op case, on L = sum(dout * (out - start)) with a random dout.

    `start` is out before anything moves: it has no part in the slope, and without it the
    slope of one element would drown in the rounding of a sum over all the others.
    """
    inputs = case.inputs(rng)
    start = case.forward(team, **inputs)
    dout = rng.standard_normal(start.shape)
    gradients = case.backward(team, dout, **inputs)

    def loss(**inputs):
        return float(np.sum(dout * (case.forward(team, **inputs) - start)))

    return check_gradient(case.name, loss, inputs, gradients, OP_TOLERANCE, exhaustive, rng)


def check_gradient(name, function, inputs, gradients, tolerance, exhaustive, rng):
    """One Check per entry of `gradients` (input name -> dL/dinput), where L = function(**inputs), a float.

    An input is moved in place and restored exactly, so `function` may as well read the
    arrays from somewhere else.  `gradients` must stay as they are meanwhile.
    """
    evaluate = partial(function, **inputs)
    return [_check_input(f"{name}.{key}", evaluate, inputs[key], gradient, tolerance, exhaustive, rng)
            for key, gradient in gradients.items()]


def equipped_team(threads=1, dtype=np.float64, compute="full"):
    """A team with scratch of its own, for work outside an arena."""
    team = Team(threads, compute)
    matmul.lend(team, np.empty((threads, matmul.scratch_elements(compute)), dtype))
    return team


def _check_input(name, evaluate, x, gradient, tolerance, exhaustive, rng):
    if not np.isfinite(gradient).all():
        bad = np.argwhere(~np.isfinite(gradient))[0]
        return Check(name, math.inf, tolerance, f"{_bracket(bad)}: analytic {gradient[tuple(bad)]}")
    worst = Check(name, 0.0, tolerance, "")
    step, typical = STEP * (_rms(x) or 1.0), FLOOR * _rms(gradient)
    for label, v in _directions(x.shape, exhaustive, rng):
        numeric, analytic = _slope(evaluate, x, v, step), float(np.sum(gradient * v))
        error = _relative_error(numeric, analytic, typical * np.linalg.norm(v) or 1.0)
        if error >= worst.max_relative_error:
            worst = Check(name, error, tolerance, f"{label}: numeric {numeric:.10g}, analytic {analytic:.10g}")
    return worst


def _directions(shape, exhaustive, rng):
    """(label, v) of each direction to look along."""
    if not exhaustive:
        for count in range(DIRECTIONS):
            yield f"direction {count}", rng.standard_normal(shape)
        return
    for index in np.ndindex(shape):
        v = np.zeros(shape)
        v[index] = 1
        yield _bracket(index), v


def _slope(evaluate, x, v, step):
    """Slope of evaluate() along v; x is moved and put back."""
    start = x.copy()

    def at(steps):
        x[...] = start + steps * step * v
        return evaluate()

    try:
        return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)
    finally:
        x[...] = start


def _relative_error(numeric, analytic, floor):
    error = abs(numeric - analytic) / max(abs(numeric), abs(analytic), floor)
    return float(error) if math.isfinite(error) else math.inf


def _rms(x):
    return float(np.sqrt(np.mean(x * x)))


def _bracket(index):
    return f"[{', '.join(str(i) for i in index)}]"
