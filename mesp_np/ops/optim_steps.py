"""Optimiser steps: how a parameter moves, given its gradient.

Shapes    param, grad, first, second : (M,)   a tensor and its moments, seen as flat rows of
          numbers; every element moves on its own

SGD       param -= rate (grad + decay param)

AdamW     With t = 1, 2, ... counting steps:
              param  -= rate decay param                          decoupled weight decay
              first   = beta1 first  + (1 - beta1) grad           mean of the gradient
              second  = beta2 second + (1 - beta2) grad^2         mean of its square
              param  -= rate (first / (1 - beta1^t)) / (sqrt(second / (1 - beta2^t)) + eps)
          Both means start at zero; dividing by 1 - beta^t undoes that bias.

Saved      SGD nothing; AdamW two moments per parameter
Cost       4 M FLOPs for SGD, 14 M for AdamW

The gradient is multiplied by `clip` on the way in, which is 1 unless the global norm is
above its limit (Pascanu et al., arXiv 1211.5063), and NaN when the norm is not finite: such a
step moves nothing.

Source    Kingma and Ba, Adam, arXiv 1412.6980, algorithm 1; Loshchilov and Hutter, Decoupled
          Weight Decay Regularization, arXiv 1711.05101, algorithm 2; order as in PyTorch.
"""

import math

from mesp_np.ops import expect, kernel
from mesp_np.ops.fill import flat


def sgd(team, param, grad, rate, decay, clip):
    """One SGD step on param, any shape."""
    expect(param.shape, grad=grad)
    kind = param.dtype.type
    team.rows(_sgd, flat(param), flat(grad), kind(rate), kind(decay), kind(clip), flops=4)


def adamw(team, param, grad, first, second, rate, betas, eps, decay, step, clip):
    """One AdamW step on param and its moments, any shape; step counts from 1."""
    expect(param.shape, grad=grad, first=first, second=second)
    (beta1, beta2), kind = betas, param.dtype.type
    numbers = [kind(x) for x in (rate, beta1, beta2, 1 - beta1 ** step, 1 - beta2 ** step, eps, decay, clip)]
    team.rows(_adamw, flat(param), flat(grad), flat(first), flat(second), *numbers, flops=14)


def add_squares(team, total, grad):
    """total (1,) in float64 += sum of squares of grad, in order."""
    expect((1,), total=total)
    team.run(total, 1, lambda *_: _add_squares(total, flat(grad)), flops=2 * grad.size)


@kernel
def _sgd(param, grad, rate, decay, clip, start, stop):
    if math.isnan(clip):
        return
    for i in range(start, stop):
        param[i] -= rate * (clip * grad[i] + decay * param[i])


@kernel
def _adamw(param, grad, first, second, rate, beta1, beta2, bias1, bias2, eps, decay, clip, start, stop):
    if math.isnan(clip):
        return
    one = param.dtype.type(1)
    for i in range(start, stop):
        g = clip * grad[i]
        first[i] = beta1 * first[i] + (one - beta1) * g
        second[i] = beta2 * second[i] + (one - beta2) * g * g
        moved = param[i] - rate * decay * param[i]
        param[i] = moved - rate * (first[i] / bias1) / (math.sqrt(second[i] / bias2) + eps)


@kernel
def _add_squares(total, grad):
    for i in range(len(grad)):
        total[0] += grad[i] * grad[i]
