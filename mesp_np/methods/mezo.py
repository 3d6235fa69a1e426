"""MeZO: an estimate of the gradient from forward passes alone.

    For probes i = 1 .. n, with z_i ~ N(0, I) over all trainable numbers:
        c_i = (L(theta + eps z_i) - L(theta - eps z_i)) / (2 eps)
    g_hat = (1/n) sum_i c_i z_i
    theta moves along g_hat by the run's optimiser.

To first order in eps, c_i = z_i . g, so g_hat = (1/n) sum z_i z_i^T g, and E[g_hat] = g
because E[z z^T] = I.  Its direction is mostly noise: with d trainable numbers and one
probe, |cos(g_hat, g)| = |z . g| / (|z| |g|) has mean sqrt(2 / (pi d)).

Memory    No tensor outlives its block: the peak is that of inference.  z is never stored;
          it is formed again from a key (seed, step, probe, tensor) where it is needed.

Restore   theta + eps z is read from a copy of the part of the model being computed (one
          block at a time), so theta is never touched and needs no restoring.  The published
          scheme (`--perturb inplace`) adds eps z, -2 eps z, +eps z to theta itself; each sum
          rounds, and theta is not quite what it was.

kept in a block: nothing

The gradient estimate is formed one tensor at a time in the update, so its cost is that
of the largest trainable tensor.  The reported loss is the mean of the two evaluations,
averaged over probes.

Live peak, in elements beyond `fixed` (see `methods/__init__.py`), LoRA on all seven
projections:

    head_less = head - CL*D
    loss = N*D + head_less
    mlp = g + N*D + 2*N*KV*(N > C) + C*(D + 3*F)
    peak = max(loss, mlp)

head_less: no gradient of the head's input.  mlp: the layer's perturbed adapters, x, and of a tile mid,
gate, up and act; k and v are there until the last tile has read them.  out is written over x.

Source    Malladi et al., Fine-Tuning Language Models with Just Forward Passes, arXiv
          2305.17333, algorithm 1 and definition 1 (SPSA).
"""

from contextlib import contextmanager
from functools import partial

import numpy as np

from mesp_np.ops.fill import fill
from mesp_np.ops.noise import add_noise, key


def projections(engine, window, tokens):
    """(c, loss): the directional derivative of each probe, and the mean loss per token.

    window  the batches of a step; tokens  trained tokens in it
    """
    eps = engine.run.mezo_eps
    evaluate = _pair_in_place if engine.run.perturb == "inplace" else _pair_from_copies
    pairs = [evaluate(engine, window, probe, eps) for probe in range(engine.run.probes)]
    derivatives = [(above - below) / tokens / (2 * eps) for above, below in pairs]
    return derivatives, float(np.mean(pairs)) / tokens


def estimate(engine, derivatives, visit):
    """visit(parameter, grad) for every trainable parameter, with its part of g_hat in `grad`."""
    for index, parameter in enumerate(engine.parameters):
        with engine.arena.temp(parameter.name + ".grad", parameter.value.shape, category="grad") as grad:
            fill(engine.team, grad, 0)
            for probe, c in enumerate(derivatives):
                add_noise(engine.team, grad, grad, _key(engine, probe, index), c / len(derivatives))
            visit(parameter, grad)


def _pair_from_copies(engine, window, probe, eps):
    """Losses of a window at theta + eps z and theta - eps z, each part of the model read from a copy."""
    position = {id(p): index for index, p in enumerate(engine.parameters)}

    @contextmanager
    def around(parameters, amount):
        moved = [(p, p.value) for p in parameters if p.trainable]
        for p, value in moved:
            p.value = engine.arena.alloc(p.name + ".copy", value.shape)
            add_noise(engine.team, p.value, value, _key(engine, probe, position[id(p)]), amount)
        yield
        for p, value in moved:
            engine.arena.free(p.value)
            p.value = value

    return [engine.window_loss(window, partial(around, amount=amount)) for amount in (eps, -eps)]


def _pair_in_place(engine, window, probe, eps):
    """The same by the published scheme: theta itself is moved by +1, -2, +1 times eps z."""
    def move(amount):
        for index, p in enumerate(engine.parameters):
            add_noise(engine.team, p.value, p.value, _key(engine, probe, index), amount)

    losses = []
    for amount in (eps, -2 * eps):
        move(amount)
        losses.append(engine.window_loss(window))
    move(eps)
    return losses


def _key(engine, probe, index):
    return key(engine.run.seed, engine.steps, probe, index)
