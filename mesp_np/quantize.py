"""Quantising a model: its linears and its embedding as codes of 4 or 8 bits, in MLX's affine form.

What is written is what mlx-lm's own converter writes: a matrix becomes codes, scales and biases
(`ops/quant.py`), the latter two in the dtype in which the matrix was stored; norms and the
biases of q, k and v stay as they are.  A tied head is the embedding, and quantised with it.

Rows are widened and quantised a few at a time, when they are written: the three parts of a matrix
are each made from it anew, which costs less than to hold a second model.
"""

import math

import numpy as np

from mesp_np.checkpoint.weight_files import part_names
from mesp_np.errors import refuse
from mesp_np.ops.quant import BF16, SCALE_FORMS, Quantised, part_shapes, quantise, round_bf16, widen

BLOCK = 1 << 20                  # numbers quantised at once


class Part:
    """Codes, scales or biases (part 0, 1 or 2) of a stored matrix (out, in); made when rows are asked for."""

    def __init__(self, stored, part, bits, group):
        self.stored, self.part, self.bits, self.group = stored, part, bits, group
        self.shape = part_shapes(stored.shape, bits, group)[part]
        narrow = stored.dtype if stored.dtype in SCALE_FORMS else np.dtype(np.float32)         # of float64
        self.dtype = Quantised.dtype if part == 0 else narrow

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows):
        first, stop, _ = rows.indices(len(self.stored))
        step = max(1, BLOCK // self.stored.shape[1])
        return np.concatenate([self._made(self.stored[row:min(row + step, stop)]) for row in range(first, stop, step)])

    def _made(self, stored):
        values = np.empty(stored.shape, np.float32)
        widen(values, stored)
        made = quantise(values, self.bits, self.group)[self.part]
        return round_bf16(made) if self.dtype == BF16 else made.astype(self.dtype, copy=False)


def quantised_tensors(weights, bits, group):
    """Tensor name -> what is stored, from plain weights (checkpoint name -> array).

    Raises UserError listing the matrices whose rows are no whole groups.
    """
    matrices = [name for name, stored in weights.items() if stored.ndim == 2]
    refuse("the model cannot be quantised", [f"{name} has rows of {weights[name].shape[1]}, no multiple of {group}"
                                             for name in matrices if weights[name].shape[1] % group],
           "try a smaller --group-size")
    tensors = {name: stored for name, stored in weights.items() if stored.ndim != 2}
    for name in matrices:
        tensors |= {part: Part(weights[name], index, bits, group) for index, part in enumerate(part_names(name))}
    return tensors


def config_changes(bits, group):
    """What config.json says from then on: mlx-lm reads the first key, the Hugging Face hub the second."""
    block = {"bits": bits, "group_size": group, "mode": "affine"}
    return {"quantization": block, "quantization_config": block}
