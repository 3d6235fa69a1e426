"""Finite differences of a whole block and a whole model, by every exact method.

The model is tiny, random, and awkward on purpose: six query heads on two key/value heads,
sizes that divide nothing, an odd sequence, labels left out, a vocabulary that the loss
tile does not divide.  Adapters are not zero, so no gradient is.
"""

import numpy as np

from mesp_np.arena import Arena
from mesp_np.batch import Batch
from mesp_np.block import Block
from mesp_np.block_backward import backward
from mesp_np.config import ModelConfig, RunConfig
from mesp_np.engine import Engine, plan_step
from mesp_np.gradcheck import check_gradient, equipped_team
from mesp_np.methods import METHODS
from mesp_np.ops import rope
from mesp_np.ops.cross_entropy import IGNORE
from mesp_np.params import build, members, trainable

TOLERANCE = 1e-6
EXACT = [method.name for method in METHODS.values() if method.exact]
TINY = ModelConfig(vocab_size=29, hidden_size=24, intermediate_size=34, num_hidden_layers=2, num_attention_heads=6,
                   num_key_value_heads=2, head_dim=4, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True)
UNTIED = ModelConfig(**(vars(TINY) | {"tie_word_embeddings": False}))
MODEL_CASES = [(method, TINY, (2, 7), {"method": method}) for method in EXACT] + [
    ("one token", TINY, (1, 1), {"loss": "vocab:10"}),
    ("full tied", TINY, (1, 5), {"trainable": "full", "loss": "vocab:10"}),
    ("full untied", UNTIED, (2, 3), {"trainable": "full", "method": "mebp", "loss": "full"}),
    ("some targets", TINY, (1, 6), {"targets": ("v_proj", "down_proj"), "method": "mesp"}),
]


def check_model(exhaustive=False, seed=0):
    """Every trainable tensor of a two-layer model, for each exact method and some other settings."""
    return [check for case in MODEL_CASES for check in _check_model(*case, exhaustive, seed)]


def check_block(exhaustive=False, seed=0):
    """The input and every adapter of one block, for each exact method."""
    return [check for method in EXACT for check in _check_block(METHODS[method], (2, 7), exhaustive, seed)]


def random_weights(config, rng):
    """Checkpoint name -> float64 array; norm weights around one, everything else around zero."""
    return {name: ("norm" in name) + 0.4 * rng.standard_normal(shape) for name, shape in config.weight_shapes().items()}


def _run(shape, **changes):
    return RunConfig(**({"batch_size": shape[0], "seq": shape[1], "rank": 3, "alpha": 6.0, "dtype": "float64",
                         "loss": "rows:4"} | changes))


def _batch(config, shape, rng):
    ids, labels = (rng.integers(0, config.vocab_size, shape) for _ in range(2))
    labels[rng.random(shape) < 0.2] = IGNORE
    labels[0, 0], labels[-1, -1] = 0, config.vocab_size - 1
    return Batch.of(ids, labels)


def _check_model(name, config, shape, changes, exhaustive, seed):
    rng, run = np.random.default_rng(seed), _run(shape, **changes)
    weights, batch = random_weights(config, rng), _batch(config, shape, rng)
    with Engine(config, weights, run, plan_step(config, run, weights=weights).extent_bytes) as engine:
        for p in engine.parameters:
            p.value[...] += 0.3 * rng.standard_normal(p.value.shape)
        inputs = {p.name: p.value for p in engine.parameters}
        gradients = engine.gradients(batch)
        return check_gradient(f"model.{name}", lambda **_: engine.loss(batch), inputs, gradients, TOLERANCE,
                              exhaustive, rng)


def _check_block(method, shape, exhaustive, seed):
    """L = sum(dout * out), so that the gradient of the block's output is dout."""
    rng = np.random.default_rng(seed)
    weights, run = random_weights(TINY, rng), _run(shape)
    x, dout = rng.standard_normal((2, shape[0] * shape[1], TINY.hidden_size))
    with equipped_team() as team:
        arena = Arena(1 << 24, np.float64, poison=True)
        cos, sin = (arena.alloc(table, (shape[1], TINY.head_dim // 2)) for table in ("cos", "sin"))
        rope.tables(team, cos, sin, TINY.rope_theta)
        layer = build(arena, team, TINY, weights, run).layers[1]
        starts = np.zeros(len(x), np.int32)
        block = Block(1, layer, TINY, shape, (cos, sin, starts), arena, team, run.row_tile)
        adapters = trainable(members(layer))
        for p in adapters:
            p.value[...] = 0.5 * rng.standard_normal(p.value.shape)
            p.grad = np.zeros_like(p.value)

        def loss(**_):
            out, _ = block.forward(x)
            value = float(np.sum(dout * out))
            arena.free(out)
            return value

        dx = dout.copy()
        backward(block, _saved(block, x, method, arena), dx)
        inputs = {"x": x} | {p.name: p.value for p in adapters}
        gradients = {"x": dx} | {p.name: p.grad for p in adapters}
        return check_gradient(f"block.{method.name}", loss, inputs, gradients, TOLERANCE, exhaustive, rng)


def _saved(block, x, method, arena):
    """What the method has when the backward begins."""
    if method.checkpoint:
        return block.replay(x, method.keep)
    out, saved = block.forward(x, method.keep)
    arena.free(out)
    return saved
