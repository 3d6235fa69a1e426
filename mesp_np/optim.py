"""Optimisers and learning-rate schedules."""

import math

from mesp_np.ops import optim_steps
from mesp_np.ops.fill import fill


class Optimizer:
    """SGD or AdamW over the trainable parameters; AdamW's moments live in the arena."""

    def __init__(self, arena, team, parameters, run):
        self._team, self._run = team, run
        self.moments = {}
        if run.optimizer == "adamw":
            for p in parameters:
                pair = [arena.alloc(f"{p.name}.{name}", p.value.shape, category="optimizer")
                        for name in ("mean", "square")]
                for moment in pair:
                    fill(team, moment, 0)
                self.moments[p.name] = pair

    def step(self, parameter, grad, rate, step, clip=1.0):
        """Move one parameter along its gradient, which is first multiplied by `clip`; `step` counts from 1."""
        run = self._run
        if run.optimizer == "sgd":
            optim_steps.sgd(self._team, parameter.value, grad, rate, run.weight_decay, clip)
        else:
            optim_steps.adamw(self._team, parameter.value, grad, *self.moments[parameter.name], rate, run.betas,
                              run.adam_eps, run.weight_decay, step, clip)


def clip_factor(squares, limit):
    """The factor on gradients that brings a global norm of sqrt(squares[0]) down to `limit` (0: no limit).

    NaN when the norm is not finite: the step must not move anything.
    """
    norm = math.sqrt(squares[0])
    if not math.isfinite(norm):
        return math.nan
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


SCHEDULES = {                           # what is left of the peak when a part `done` of the steps is behind
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def learning_rate(step, steps, peak, schedule="constant", warmup=0):
    """Rate of a step counted from 1: a linear warm-up, then one of SCHEDULES.

    The last step still moves: the decay reaches zero one step after it.
    """
    if step <= warmup:
        return peak * step / warmup
    done = (step - 1 - warmup) / max(1, steps - warmup)
    return peak * SCHEDULES[schedule](done)
