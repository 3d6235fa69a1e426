"""Every op at a few shapes, as functions that return what they make: what `gradcheck.py` checks.

A case gives an op's inputs, its forward and its backward.  To cover a new op, write the
two as functions here and add a case to OP_CASES.  Shapes are ordinary and awkward in turn:
odd sizes, one row, one position, more keys than queries, a vocabulary that the tile does
not divide.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mesp_np.ops import (
    attention,
    cross_entropy,
    dropout,
    embedding,
    linear,
    lora,
    matmul,
    residual,
    rmsnorm,
    rope,
    select,
    swiglu,
)


@dataclass(frozen=True)
class OpCase:
    """An op at a shape.

    inputs    rng -> arguments by name
    forward   (team, **inputs) -> out
    backward  (team, dout, **inputs) -> gradients by input name
    """

    name: str
    inputs: Callable
    forward: Callable
    backward: Callable


def _made(op, team, shape, *args):
    """What `op` writes into an array of zeros; several ops add to their outputs."""
    out = np.zeros(shape)
    op(team, out, *args)
    return out


def _multiply(team, a, b):
    return _made(matmul.multiply, team, (len(a), b.shape[1]), a, b)


def _multiply_backward(team, dout, a, b):
    return {"a": _multiply(team, dout, b.T), "b": _multiply(team, a.T, dout)}


def _multiply_add(team, base, a, b, scale):
    out = base.copy()
    matmul.multiply(team, out, a, b, add=True, scale=scale)
    return out


def _multiply_add_backward(team, dout, base, a, b, scale):
    return {"base": dout, "a": _multiply_add(team, np.zeros_like(a), dout, b.T, scale),
            "b": _multiply_add(team, np.zeros_like(b), a.T, dout, scale)}


def _linear(team, x, weight, bias):
    return _made(linear.forward, team, (len(x), len(weight)), x, weight, bias)


def _linear_backward(team, dout, x, weight, bias):
    return {"x": _made(linear.backward_input, team, x.shape, dout, weight),
            "weight": _made(linear.backward_weight, team, weight.shape, dout, x),
            "bias": _made(linear.backward_bias, team, bias.shape, dout)}


def _lora(team, x, A, B, scale):
    h = _made(lora.project, team, (len(x), len(A)), x, A)
    return _made(matmul.multiply, team, (len(x), len(B)), *lora.added(h, B, scale))


def _lora_backward(team, dout, x, A, B, scale):
    h = _made(lora.project, team, (len(x), len(A)), x, A)
    dh = _made(lora.backward_hidden, team, h.shape, dout, B, scale)
    dA, dB = np.zeros_like(A), np.zeros_like(B)
    lora.backward_params(team, dA, dB, dh, dout, x, h, scale)
    return {"x": _made(matmul.multiply, team, x.shape, *lora.backward_added(dh, A)), "A": dA, "B": dB}


def _rmsnorm(team, x, weight, eps):
    rstd = _made(rmsnorm.statistics, team, len(x), x, eps)
    return _made(rmsnorm.forward, team, x.shape, x, rstd, weight)


def _rmsnorm_backward(team, dout, x, weight, eps):
    rstd = _made(rmsnorm.statistics, team, len(x), x, eps)
    return {"x": _made(rmsnorm.backward, team, x.shape, dout, x, rstd, weight),
            "weight": _made(rmsnorm.backward_weight, team, weight.shape, dout, x, rstd)}


def _rotated(op, team, x, T, E, starts):
    """Either direction of rope, which works in place, on a copy of x."""
    out, (cos, sin) = x.copy(), np.empty((2, T, E // 2))
    rope.tables(team, cos, sin, base=100.0)
    op(team, out, cos, sin, starts)
    return out


def _rope(team, x, T, E, starts):
    return _rotated(rope.forward, team, x, T, E, starts)


def _rope_backward(team, dout, x, T, E, starts):
    return {"x": _rotated(rope.backward, team, dout, T, E, starts)}


def _attention_whole(team, q, k, v, starts, shape):
    p = _made(attention.probabilities, team, shape, q, k, starts)
    return _made(attention.context, team, q.shape, p, v)


def _attention_whole_backward(team, dout, q, k, v, starts, shape):
    p = _made(attention.probabilities, team, shape, q, k, starts)
    return _attention_tiles_backward(team, dout, q, k, v, starts, shape, p)


def _attention_tiles(team, q, k, v, starts, shape):
    scratch = np.empty((team.threads, attention.forward_scratch(*shape[2:])))
    return _made(attention.forward, team, q.shape, q, k, v, starts, shape, scratch)


def _attention_tiles_backward(team, dout, q, k, v, starts, shape, p=None):
    (_, H, T, S), (dq, dk, dv) = shape, map(np.zeros_like, (q, k, v))
    scratch = np.empty((team.threads, attention.backward_scratch(T, S, q.shape[1] // H)))
    attention.backward(team, dq, dk, dv, dout, q, k, v, p, starts, shape, scratch)
    return {"q": dq, "k": dk, "v": dv}


def _swiglu(team, gate, up):
    return _made(swiglu.forward, team, gate.shape, gate, up)


def _swiglu_backward(team, dout, gate, up):
    dgate, dup = gate.copy(), up.copy()
    swiglu.backward(team, dgate, dup, dout)
    return {"gate": dgate, "up": dup}


def _dropout(team, x, key, rate):
    return _made(dropout.forward, team, x.shape, x, key, rate)


def _dropout_backward(team, dout, x, key, rate):
    return {"x": _made(dropout.backward, team, x.shape, dout, key, rate)}


def _residual(team, branch, x):
    out = branch.copy()
    residual.forward(team, out, x)
    return out


def _residual_backward(team, dout, branch, x):
    return {"branch": dout, "x": dout}


def _embedding(team, table, ids):
    return _made(embedding.forward, team, (len(ids), table.shape[1]), ids, table)


def _embedding_backward(team, dout, table, ids):
    return {"table": _made(embedding.backward, team, table.shape, dout, ids)}


def _select(team, x, rows):
    return _made(select.forward, team, (len(rows), x.shape[1]), x, rows)


def _select_backward(team, dout, x, rows):
    return {"x": _made(select.backward, team, x.shape, dout, rows)}


def _loss(team, logits, labels):
    return _made(cross_entropy.forward, team, len(labels), np.empty(len(labels)), logits, labels)


def _loss_backward(team, dout, logits, labels):
    dlogits = logits.copy()
    cross_entropy.backward(team, dlogits, *np.empty((2, len(labels))), labels, scale=1.0)
    return {"logits": dlogits * dout[:, None]}


def _loss_statistics(team, logits, labels, width):
    """(losses, log-sum-exp), taking in a tile of the vocabulary at a time."""
    largest, (total, shrink, losses) = np.full(len(labels), -np.inf), np.zeros((3, len(labels)))
    for first in range(0, logits.shape[1], width):
        tile = logits[:, first:first + width].copy()
        cross_entropy.accumulate(team, tile, largest, total, shrink, losses, labels, first)
    cross_entropy.finish(team, losses, np.empty(len(labels)), largest, total)
    return losses, largest


def _loss_tiles(team, logits, labels, width):
    losses, _ = _loss_statistics(team, logits, labels, width)
    return losses


def _loss_tiles_backward(team, dout, logits, labels, width):
    dlogits, (_, lse) = logits.copy(), _loss_statistics(team, logits, labels, width)
    for first in range(0, logits.shape[1], width):
        cross_entropy.gradient_tile(team, dlogits[:, first:first + width], lse, labels, first, scale=1.0)
    return {"logits": dlogits * dout[:, None]}


def _normal(others=(), **shapes):
    """rng -> standard normal arrays of these shapes, and what else the op is given."""
    return lambda rng: {name: rng.standard_normal(shape) for name, shape in shapes.items()} | dict(others)


def _with_zero_row(draw):
    """The same inputs, the first row of x all zero."""
    def inputs(rng):
        drawn = draw(rng)
        drawn["x"][0] = 0
        return drawn
    return inputs


def _product_cases(N, D, M, R):
    """Products of (N, D) with (D, M), and LoRA of rank R beside one."""
    scale, add = {"scale": 0.7}, _normal({"scale": 0.7}, base=(N, M), a=(N, D), b=(D, M))
    yield OpCase(f"matmul {N}x{D}x{M}", _normal(a=(N, D), b=(D, M)), _multiply, _multiply_backward)
    yield OpCase(f"matmul add {N}x{D}x{M}", add, _multiply_add, _multiply_add_backward)
    yield OpCase(f"linear {N}x{D}x{M}", _normal(x=(N, D), weight=(M, D), bias=(M,)), _linear, _linear_backward)
    yield OpCase(f"lora {N}x{D}x{M} R={R}", _normal(scale, x=(N, D), A=(R, D), B=(M, R)), _lora, _lora_backward)


def _row_cases(N, D):
    """Ops on rows of width D; eps is so large that even the zero row is smooth at the scale of a step."""
    norm = _normal({"eps": 0.1}, x=(N, D), weight=(D,))
    yield OpCase(f"rmsnorm {N}x{D}", norm, _rmsnorm, _rmsnorm_backward)
    yield OpCase(f"rmsnorm zero row {N}x{D}", _with_zero_row(norm), _rmsnorm, _rmsnorm_backward)
    key = {"key": np.uint64(6), "rate": 0.4}
    yield OpCase(f"dropout {N}x{D}", _normal(key, x=(N, D)), _dropout, _dropout_backward)
    yield OpCase(f"swiglu {N}x{D}", _normal(gate=(N, D), up=(N, D)), _swiglu, _swiglu_backward)
    yield OpCase(f"residual {N}x{D}", _normal(branch=(N, D), x=(N, D)), _residual, _residual_backward)
    yield OpCase(f"select {N}x{D}", _normal({"rows": np.arange(0, N, 2)}, x=(N, D)), _select, _select_backward)


def _attention_cases(B, H, K, T, S, E, packed=False):
    """Attention with whole probabilities and in tiles, and rope on its queries; perhaps two texts in a row."""
    label = f"B={B} H={H} K={K} T={T} S={S} E={E}" + " packed" * packed
    starts = np.tile(np.where(np.arange(T) >= T // 3, T // 3, 0), B) if packed else np.zeros(B * T, int)
    inputs = _normal({"starts": starts, "shape": (B, H, T, S)},
                     q=(B * T, H * E), k=(B * S, K * E), v=(B * S, K * E))
    yield OpCase(f"attention whole {label}", inputs, _attention_whole, _attention_whole_backward)
    yield OpCase(f"attention tiles {label}", inputs, _attention_tiles, _attention_tiles_backward)
    yield OpCase(f"rope {label}", _normal({"T": T, "E": E, "starts": starts}, x=(B * T, H * E)), _rope, _rope_backward)


def _vocabulary_cases(N, D, V, width):
    """Table and loss over V tokens; the first token and the last among the ids, and some of them twice."""
    ids = np.linspace(0, V - 1, N).astype(np.int32)
    twice, size = np.append(ids, ids[::2]), {"labels": ids, "width": width}
    yield OpCase(f"embedding {N}x{D} V={V}", _normal({"ids": twice}, table=(V, D)), _embedding, _embedding_backward)
    yield OpCase(f"cross_entropy rows {N}x{V}", _normal({"labels": ids}, logits=(N, V)), _loss, _loss_backward)
    yield OpCase(f"cross_entropy tiles {N}x{V} by {width}", _normal(size, logits=(N, V)),
                 _loss_tiles, _loss_tiles_backward)


OP_CASES = [
    *_product_cases(N=6, D=16, M=8, R=4), *_product_cases(N=7, D=33, M=5, R=3),
    *_row_cases(N=6, D=16), *_row_cases(N=7, D=33), *_row_cases(N=1, D=1),
    *_attention_cases(B=2, H=4, K=2, T=6, S=6, E=8), *_attention_cases(B=1, H=6, K=2, T=7, S=7, E=4),
    *_attention_cases(B=2, H=2, K=1, T=1, S=1, E=4), *_attention_cases(B=1, H=3, K=3, T=5, S=9, E=2),
    *_attention_cases(B=1, H=2, K=1, T=67, S=67, E=2), *_attention_cases(B=2, H=4, K=2, T=11, S=11, E=4, packed=True),
    *_vocabulary_cases(N=6, D=8, V=20, width=5), *_vocabulary_cases(N=7, D=33, V=33, width=8),
]
