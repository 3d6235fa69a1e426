"""Small models stored as codes, and the plain weights that they stand for."""

import numpy as np

from mesp_np.config_json import Quantization
from mesp_np.ops.quant import Quantised, quantise, round_bf16, widen
from tests import small

STORES = {"f32": np.float32, "f16": np.float16, "bf16": round_bf16}


def model_config(bits=4, group_size=32, **changes):
    """As small.model_config, with rows that are whole groups."""
    sizes = dict(hidden_size=96, intermediate_size=160, num_attention_heads=6, head_dim=16)
    return small.model_config(**(sizes | changes), quantization=Quantization(bits, group_size))


def stored(values, bits=4, group=32, store="f16"):
    """A float32 matrix as Quantised, its scales and biases rounded to a stored form."""
    codes, *others = quantise(values, bits, group)
    return Quantised(codes, *map(STORES[store], others), bits)


def weights(config, store="f16", seed=0):
    """Checkpoint name -> Quantised matrices, and vectors as `store`."""
    form = config.quantization
    return {name: stored(values, form.bits, form.group_size, store) if values.ndim == 2 else STORES[store](values)
            for name, values in small.weights(config, seed=seed).items()}


def widened(weights, dtype=np.float32):
    """The same weights as plain arrays of `dtype`."""
    made = {}
    for name, value in weights.items():
        made[name] = np.empty(value.shape, dtype)
        widen(np.atleast_2d(made[name]), value if value.ndim == 2 else value[np.newaxis])
    return made
