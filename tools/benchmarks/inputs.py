"""What all systems are given: one set of numbers as folders that each of them reads itself.

    form        what is in the folder
    f32         float32, read by this engine and by all others
    bf16, 4bit  the very same numbers in fewer bits, read by this engine

The numbers of a random model are chosen so that all forms hold them exactly.  A folder that is given is run as float32
and as it is stored.  The adapter is in PEFT's format, and in bfloat16's numbers.
"""

from zlib import crc32

import numpy as np
import random_model

from mesp_np.checkpoint import adapter, folder
from mesp_np.config import PRESETS
from mesp_np.engine import Engine
from mesp_np.ops.quant import BF16, Quantised, round_bf16, widen
from mesp_np.params import Parameter, phantom_weights

FORMS = ("bf16", "f32", "4bit")
STORED = {np.dtype(np.float32): "f32", BF16: "bf16", np.dtype(np.float16): "f16"}
STEP, EXTREMES = 2.0 ** -8, (-8, 7)
DEVIATION = 0.02


class Exact(random_model.Random):
    """A matrix of whole multiples of STEP, -8 to 7; the smallest group of codes has both, so 4 bits hold it exactly."""

    def _block(self, block):
        rng = np.random.default_rng([*self.key, block])
        values = rng.integers(1 - 8, 7, (random_model.BLOCK, self.shape[1]), endpoint=True).astype(np.float32)
        for place, extreme in enumerate(EXTREMES):
            values[:, place::min(random_model.GROUPS)] = extreme
        return self.round(np.float32(STEP) * values)


class Dense:
    """A stored matrix (out, in) in float32, its rows made when asked for."""

    ndim, dtype = 2, np.dtype(np.float32)

    def __init__(self, stored):
        self.stored, self.shape = stored, stored.shape

    def __getitem__(self, rows):
        values = np.empty(self.stored[rows].shape, np.float32)
        widen(values, self.stored[rows])
        return values


def forms(source, wanted, seed, out):
    """(ModelConfig, form -> folder) of a preset or a folder, the forms being those that are `wanted` and hold its
    numbers exactly.

    What is not there already is written into the folder `out`.
    """
    made = {}
    if source in PRESETS:
        source, preset = out / "bf16", PRESETS[source]
        random_model.write(source, preset, "bf16", seed, Exact)
        if "4bit" in wanted:
            made["4bit"] = out / "4bit"
            random_model.write(made["4bit"], preset, "mlx-4bit", seed, Exact)
    model = folder.load(source)
    made[_form(model.weights)] = model.folder
    if "f32" in wanted and "f32" not in made:
        made["f32"] = out / "f32"
        _write_f32(made["f32"], model)
    return model.config, {form: made[form] for form in wanted if form in made}


def _form(weights):
    matrix = weights["model.embed_tokens.weight"]
    return f"{matrix.bits}bit" if isinstance(matrix, Quantised) else STORED[matrix.dtype]


def _write_f32(out, model):
    dense = {name: Dense(stored) if stored.ndim == 2 else Dense(stored[np.newaxis])[:][0]
             for name, stored in model.weights.items()}
    folder.derive(out, model.folder, dense, {"torch_dtype": "float32", "dtype": None, "quantization": None,
                                             "quantization_config": None})


def write_adapter(out, config, run):
    """A random adapter, B too, so that no gradient is zero."""
    with Engine(config, phantom_weights(config), run) as engine:
        parameters = [Parameter(p.name, _draw(run.seed, p.name, p.value.shape)) for p in engine.parameters]
    adapter.save(out, parameters, run, "random")


def tokens(vocab_size, run):
    """T + 1 random tokens: T inputs and their targets."""
    return np.random.default_rng(run.seed).integers(vocab_size, size=run.seq + 1).tolist()


def _draw(seed, name, shape):
    noise = np.random.default_rng([seed, crc32(name.encode())]).standard_normal(shape, np.float32)
    return Dense(round_bf16(DEVIATION * noise))[:]
