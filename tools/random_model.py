"""Make a model of random weights in the exact shapes of a preset, to measure bytes and times without a download.

    python tools/random_model.py PRESET OUT [--dtype bf16|f16|f32|mlx-4bit] [--seed N]
    mesp-np compare --model OUT

It has no tokenizer: `plan` and `compare` need none.  A number depends on the seed, its tensor's name and its place
alone, so the same command writes the same bytes.  Rows are made when they are written: 7B takes no more memory
than 0.5B.  `mlx-4bit` is the bf16 model quantised.
"""

import argparse
from zlib import crc32

import numpy as np

from mesp_np.checkpoint import safetensors_file
from mesp_np.checkpoint.atomic import new_folder
from mesp_np.checkpoint.folder import STORED
from mesp_np.config import PRESETS
from mesp_np.json_file import write_object
from mesp_np.ops.quant import round_bf16
from mesp_np.quantize import config_changes, quantised_tensors

DEVIATION = 0.02                 # of a weight, as models are initialised; norms are about 1
BITS, GROUPS = 4, (64, 32)
ROUND = {"bf16": round_bf16, "f16": np.float16, "f32": np.float32}
BLOCK = 64                       # rows that come from one generator


class Random:
    """A matrix (out, in) in a stored form, its rows made when asked for."""

    ndim = 2

    def __init__(self, name, shape, form, seed):
        self.shape, self.key, self.round = shape, [seed, crc32(name.encode())], ROUND[form]
        self.dtype, self.mean = np.dtype(STORED[form][1]), np.float32("norm" in name)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, rows):
        first, stop, _ = rows.indices(len(self))
        blocks = range(first // BLOCK, -(-stop // BLOCK))
        return np.concatenate([self._block(block) for block in blocks])[first % BLOCK:][:stop - first]

    def _block(self, block):
        values = np.random.default_rng([*self.key, block]).standard_normal((BLOCK, self.shape[1]), np.float32)
        return self.round(self.mean + DEVIATION * values)


def weights(config, form, seed, kind):
    """Checkpoint name -> tensor; a norm weight or a bias is the first row of a matrix."""
    return {name: kind(name, shape, form, seed) if len(shape) == 2 else Random(name, (1, *shape), form, seed)[:1][0]
            for name, shape in config.weight_shapes().items()}


def write(out, config, dtype, seed, kind=Random):
    """The folder: config.json and the weights; `kind` makes the matrices."""
    form = "bf16" if dtype == "mlx-4bit" else dtype
    tensors, raw = weights(config, form, seed, kind), config.to_json() | {"torch_dtype": STORED[form][0]}
    if dtype == "mlx-4bit":
        widths = [shape[1] for shape in config.weight_shapes().values() if len(shape) == 2]
        group = next(group for group in GROUPS if not any(width % group for width in widths))
        tensors = quantised_tensors(tensors, BITS, group)
        raw |= config_changes(BITS, group)
    with new_folder(out) as folder:
        write_object(folder / "config.json", raw)
        safetensors_file.write(folder / "model.safetensors", tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--dtype", choices=[*STORED, "mlx-4bit"], default="bf16", help="stored form (default: bf16)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.out, PRESETS[args.preset], args.dtype, args.seed)


if __name__ == "__main__":
    main()
