"""Weights and adapters as plain dataclasses, named as in the checkpoint.

A Parameter is frozen or trainable.  A frozen one points at the bytes of the checkpoint
in their stored form, which are listed and not counted; with --residency widened it is a copy
in the arena instead, made dense once.  A trainable one, its gradient and its optimiser state
live in the arena.
"""

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from mesp_np.arena import phantom
from mesp_np.config import PROJECTIONS, module_name
from mesp_np.ops.quant import BF16, Quantised, from_bf16, part_shapes, widen


@dataclass
class Parameter:
    """A tensor of the model: `value` in any stored form (Quantised too) when frozen, dense when trainable."""

    name: str
    value: np.ndarray | Quantised
    trainable: bool = False
    grad: np.ndarray | None = None


@dataclass
class Lora:
    """The adapter of one linear layer: A (R, in), B (out, R), and the factor on its output."""

    A: Parameter
    B: Parameter
    scale: float


@dataclass
class Linear:
    """A projection: weight (out, in), perhaps a bias (out,), perhaps an adapter."""

    weight: Parameter
    bias: Parameter | None = None
    lora: Lora | None = None


@dataclass
class Layer:
    """One decoder layer.  `linear` is keyed by q, k, v, o, gate, up, down."""

    norm1: Parameter
    norm2: Parameter
    linear: dict


@dataclass
class Params:
    """The whole model; `head` is `embed` itself when the embeddings are tied."""

    embed: Parameter
    layers: list
    norm: Parameter
    head: Parameter

    @property
    def outside(self):
        """The parameters of no layer, each once."""
        return [self.embed, self.norm] + ([] if self.head is self.embed else [self.head])

    @property
    def frozen_layers(self):
        """How many layers lie below the lowest trained tensor: no gradient is needed there."""
        if self.embed.trainable:
            return 0
        return next((index for index, layer in enumerate(self.layers) if trainable(members(layer))), len(self.layers))

    def __iter__(self):
        """Every parameter once: layer by layer, then those of no layer."""
        for layer in self.layers:
            yield from members(layer)
        yield from self.outside


def members(layer):
    """The parameters of one layer."""
    yield layer.norm1
    for key, linear in layer.linear.items():
        if key == "gate":
            yield layer.norm2
        yield linear.weight
        if linear.bias:
            yield linear.bias
        if linear.lora:
            yield linear.lora.A
            yield linear.lora.B


def trainable(parameters):
    """Those that are trained."""
    return [p for p in parameters if p.trainable]


def build(arena, team, config, weights, run):
    """Params for a run, from checkpoint name -> stored array.

    LoRA: weights stay as stored or are widened once (`residency`), adapters are made in the arena
    (A uniform in +-1/sqrt(in), B zero: PEFT's own start).  Full: every weight is copied into the
    arena.  None: no adapters.
    """
    make = _Maker(arena, team, weights, run)
    layers = [_layer(make, config, index, run) for index in range(config.num_hidden_layers)]
    embed = make.base("model.embed_tokens.weight")
    head = embed if config.tie_word_embeddings else make.base("lm_head.weight")
    norm = make.base("model.norm.weight")
    return Params(embed, layers, norm, head)


def _layer(make, config, index, run):
    prefix = f"model.layers.{index}."
    targets = run.targets if index in run.adapted_layers(config.num_hidden_layers) else ()
    linear = {}
    for name in PROJECTIONS:
        module = prefix + module_name(name)
        weight = make.base(module + ".weight")
        has_bias = config.qkv_bias and name in ("q_proj", "k_proj", "v_proj")
        bias = make.base(module + ".bias") if has_bias else None
        lora = make.lora(f"layers.{index}.{module_name(name)}", *weight.value.shape) if name in targets else None
        linear[name.removesuffix("_proj")] = Linear(weight, bias, lora)
    return Layer(make.base(prefix + "input_layernorm.weight"), make.base(prefix + "post_attention_layernorm.weight"),
                 linear)


class _Maker:
    """Turns names into parameters, frozen or in the arena."""

    def __init__(self, arena, team, weights, run):
        self.arena, self.team, self.weights, self.run = arena, team, weights, run

    def base(self, name):
        stored, trained = self.weights[name], self.run.trainable == "full"
        if not trained and self.run.residency == "mapped":
            return Parameter(name, self._dense_vector(stored))
        value = self.arena.alloc(name, stored.shape, category="weight")
        put(self.team, value, lambda: stored)
        return Parameter(name, value, trained)

    def lora(self, module, out, width):
        if self.run.trainable != "lora":
            return None
        A, B = (self._adapter(f"{module}.lora_{side}", shape)
                for side, shape in (("A", (self.run.rank, width)), ("B", (out, self.run.rank))))
        put(self.team, A.value, lambda: self._uniform(A.name, A.value.shape))
        put(self.team, B.value, lambda: np.zeros(B.value.shape, B.value.dtype))
        return Lora(A, B, self.run.scale)

    def _adapter(self, name, shape):
        return Parameter(name, self.arena.alloc(name, shape, category="adapter"), trainable=True)

    def _uniform(self, name, shape):
        rng = np.random.default_rng([self.run.seed, crc32(name.encode())])
        bound = shape[1] ** -0.5
        return rng.uniform(-bound, bound, shape).astype(np.float32)

    def _dense_vector(self, stored):
        """Biases and norm weights are made dense once: a few kilobytes a layer."""
        if stored.ndim != 1 or stored.dtype == self.arena.dtype:
            return stored
        return (from_bf16(stored) if stored.dtype == BF16 else stored).astype(self.arena.dtype)


def put(team, array, values):
    """array = values(), a stored array of the same shape; nothing happens to a phantom."""
    team.run(array, 1, lambda *_: widen(_rows(array), _rows(values())), flops=0)


def frozen_bytes(weights, run):
    """Bytes of the frozen weights as a run holds them: mapped in their stored form, or widened in the arena."""
    if run.trainable == "full":
        return 0
    if run.residency == "mapped":
        return sum(stored.nbytes for stored in weights.values())
    return sum(stored.size for stored in weights.values()) * np.dtype(run.dtype).itemsize


def phantom_weights(config, dtype=BF16):
    """Checkpoint name -> array or Quantised with shape and no bytes, for planning without a checkpoint."""
    return {name: _phantom(name, shape, config.quantization, dtype) for name, shape in config.weight_shapes().items()}


def _phantom(name, shape, quantization, dtype):
    form = quantization and len(shape) == 2 and quantization.of(name)
    if not form:
        return phantom(shape, dtype)
    codes, scales, biases = part_shapes(shape, *form)
    return Quantised(phantom(codes, Quantised.dtype), phantom(scales, dtype), phantom(biases, dtype), form[0])


def _rows(stored):
    """A matrix as it is, a vector as its one row."""
    return stored if stored.ndim == 2 else stored[np.newaxis]
