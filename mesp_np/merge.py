"""Merging: an adapter folded into the weights it was trained beside, W + scale B A.

    y = x W^T + scale (x A^T) B^T = x (W + scale B A)^T

The sum is formed in float32 with the adapter's scale applied once, and rounded once, to the
form in which W is stored.  That rounding is not free: bfloat16 has steps of W / 256 or more, and a
change smaller than half a step is lost.  `Rounding` measures how much, as a part of the change.

A quantised base is made dense on the way, in the form of its scales: the change is finer
than its codes could hold.  Weights are made a block of rows at a time, when they are written.
"""

import math
from dataclasses import dataclass

import numpy as np

from mesp_np.errors import UserError
from mesp_np.ops.quant import BF16, Quantised, round_bf16, widen


@dataclass
class Rounding:
    """What the adapter changed in all elements, and what of that the stored form cannot hold."""

    tensors: int = 0
    elements: int = 0
    change: float = 0.0              # sum of magnitudes
    lost: float = 0.0                # sum of errors
    largest_change: float = 0.0
    largest_lost: float = 0.0

    def add(self, change, lost):
        """Count a block: the change of each element, and the error that rounding made in it."""
        change, lost = np.abs(change), np.abs(lost)
        self.elements += change.size
        self.change += float(change.sum(dtype=np.float64))
        self.lost += float(lost.sum(dtype=np.float64))
        self.largest_change = max(self.largest_change, float(change.max()))
        self.largest_lost = max(self.largest_lost, float(lost.max()))

    @property
    def mean_change(self):
        """Mean magnitude of the change of an element."""
        return self.change / self.elements

    @property
    def mean_part_lost(self):
        """Mean error of rounding, as a part of the mean change."""
        return self.lost / self.change if self.change else 0.0

    @property
    def largest_part_lost(self):
        """Largest error of rounding, as a part of the largest change."""
        return self.largest_lost / self.largest_change if self.largest_change else 0.0


class Merged:
    """A weight (out, in) in a dense stored form, its adapter if any folded in; made when rows are asked for.

    weight    params.Parameter, dense or Quantised
    lora      params.Lora or None
    rounding  where the slices are counted
    """

    def __init__(self, weight, lora, rounding):
        self.weight, self.lora, self.rounding = weight, lora, rounding
        self.shape = weight.value.shape
        self.dtype = weight.value.scales.dtype if isinstance(weight.value, Quantised) else weight.value.dtype
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, rows):
        values = _dense(self.weight.value[rows])
        with np.errstate(over="ignore", invalid="ignore"):                      # told below
            change = self._change(rows)
            values += change
            rounded = round_bf16(values) if self.dtype == BF16 else values.astype(self.dtype)
        kept = _dense(rounded)
        if not np.isfinite(kept).all():
            raise UserError(f"{self.weight.name}: not all of its values would be finite numbers in {self._form}",
                            "the adapter or the model is damaged, or alpha is too large; a float16 model's values end "
                            "at 65,504")
        if self.lora is not None:
            self.rounding.add(change, values - kept)
        return rounded

    def _change(self, rows):
        """What the adapter adds to these rows."""
        if self.lora is None:
            return np.float32(0)
        return np.float32(self.lora.scale) * (self.lora.B.value[rows] @ self.lora.A.value)

    @property
    def _form(self):
        return "bfloat16" if self.dtype == BF16 else self.dtype.name


def _dense(stored):
    """The values of a stored matrix (rows, in) in float32."""
    values = np.empty(stored.shape, np.float32)
    widen(values, stored)
    return values


def merged_weights(engine, weights):
    """(checkpoint name -> stored array or Merged, Rounding) of an engine whose adapters are filled.

    weights  the stored arrays that the engine was made with
    """
    rounding = Rounding()
    made = dict(weights)
    for p in engine.model.params:
        if isinstance(p.value, Quantised):
            made[p.name] = Merged(p, None, rounding)
    adapted = [linear for layer in engine.model.params.layers for linear in layer.linear.values() if linear.lora]
    for linear in adapted:
        made[linear.weight.name] = Merged(linear.weight, linear.lora, rounding)
    rounding.tensors = len(adapted)
    return made, rounding
