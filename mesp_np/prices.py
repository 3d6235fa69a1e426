"""What a run costs in time and, roughly, in bytes, known from steps of one layer and of two.

    work     = flops (1 + DENSE_ROWS / rows) + DISK_FLOPS bytes
    flops    = flops(all stored) + replayed replay + left_out forward
    rows     of a tile: to make a weight dense takes as long as to multiply DENSE_ROWS rows by it
    bytes    of the block inputs that go to the disk
    left_out block inputs that are not kept; each is made again by a block's forward

All layers cost the same, so what L of them cost lies on the line through one and two.  The bytes are such
a line too for as long as the peak is at the same place; it is at the end of the forward, when all that is stored
is there, or in the first replay.
"""

from dataclasses import replace
from functools import cache

import numpy as np

from mesp_np.engine import plan_step
from mesp_np.saved import tiles

# Measured on one of two cores with AVX2, at 60 GFLOP/s: steps of Qwen2.5-0.5B's blocks, T = 256, bf16 weights, with
# tiles of 128, 64 and 32 rows took 1.11, 1.29 and 1.69 times as long as with 256.  A file written and read again
# takes 3.5 ns a byte, in which two cores compute 400 FLOPs.
DENSE_ROWS = 28
DISK_FLOPS = 400
FLOPS, FORWARD, BYTES = range(3)        # what a plan says of a step: FLOPs, those of them in the forward, extent


class Prices:
    """Work and guessed bytes of runs that differ from `run` only in what is stored, and in where block inputs are."""

    def __init__(self, config, run, shape):
        self.layers = trained_layers(config, run)
        self.input_bytes = np.dtype(run.dtype).itemsize * shape[0] * shape[1] * config.hidden_size
        self.stored, layer = self._whole_and_layer(config, run, shape, stored=True)
        self.replayed, replayed_layer = self._whole_and_layer(config, run, shape, stored=False)
        self.saved = layer - replayed_layer              # FLOPs below 0: a replay; bytes: what a stored layer holds
        self.forward = layer[FORWARD]
        self.frozen = (config.num_hidden_layers - self.layers) * self.forward
        self.slowed = 1 + DENSE_ROWS * len(tiles(*shape, run.row_tile)) / (shape[0] * shape[1])

    def flops(self, run):
        """FLOPs of a step."""
        replayed, kept = self._inputs(run)
        return self.frozen + self.stored[FLOPS] - replayed * self.saved[FLOPS] + (replayed - kept) * self.forward

    def work(self, run):
        """Those, with making weights dense and the disk at their price in FLOPs."""
        on_disk = self._inputs(run)[1] * run.grad_accumulation if run.checkpoint_store == "disk" else 0
        return self.flops(run) * self.slowed + on_disk * self.input_bytes * DISK_FLOPS

    def extent(self, run):
        """Bytes, as guessed: at the end of the forward, or in the first replay, where there are more."""
        replayed, kept = self._inputs(run)
        kept *= run.checkpoint_store != "disk"
        again = kept and kept + run.checkpoint_every - 2        # inputs in the first replay beyond the one in any
        return max(self.stored[BYTES] - replayed * self.saved[BYTES] + kept * self.input_bytes,
                   (self.replayed[BYTES] + again * self.input_bytes) * bool(replayed))

    def _inputs(self, run):
        """How many layers are replayed, and how many of their inputs are kept."""
        replayed = max(self.layers - run.stored_layers, 0)
        return replayed, -(-replayed // run.checkpoint_every)

    def _whole_and_layer(self, config, run, shape, stored):
        """[FLOPS, FORWARD, BYTES] of a step of all layers, and of one: stored, or replayed from the disk."""
        one, two = (_small(config, run, shape, depth, depth * stored) for depth in (1, 2))
        return one + (self.layers - 1) * (two - one), two - one


@cache
def _small(config, run, shape, layers, stored):
    run = replace(run, layers=(), stored_layers=stored, checkpoint_store="disk", checkpoint_every=1)
    plan = plan_step(replace(config, num_hidden_layers=layers), run, shape)
    return np.array([sum(plan.flops.values()), plan.flops["forward"], plan.extent_bytes])


def trained_layers(config, run):
    """How many layers, from the top, the backward comes to."""
    if run.trainable == "full":
        return config.num_hidden_layers
    return config.num_hidden_layers - min(run.adapted_layers(config.num_hidden_layers), default=0)
