"""The model around its blocks: embedding, final norm, head and loss.

Logits are never whole unless asked for (`--loss`):

    rows:C    C rows at a time: logits (C, V), their gradient in place, and at once
              dxn = dlogits W; nothing is computed twice
    vocab:W   W tokens at a time for a row tile of the run, summing as it goes; nothing is computed
              twice while the head is frozen, and the tile's rows share each look at a weight
    full      all rows at once, as the published systems do

Rows whose label is -100 are left out before the final norm.  Memory is for tiles of the most rows
there can be, so that bytes and events depend on the batch's shape alone, never on its labels.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from mesp_np.block import Block, Dropout
from mesp_np.ops import bf16, cross_entropy, embedding, linear, rmsnorm, rope, select
from mesp_np.ops.cross_entropy import IGNORE
from mesp_np.ops.fill import fill
from mesp_np.params import put


@dataclass(frozen=True)
class Inputs:
    """A batch in the arena.

    ids, labels, starts  (N,) int32
    rows     (n,) int32, the rows with a loss
    targets  (n,) int32, their labels
    hits     (n,) int32, 1 where the target was the likeliest token
    losses   (n,) loss of each
    draw     key of the batch's dropout masks (`ops/noise.py`); None: nothing is left out
    """

    shape: tuple
    ids: np.ndarray
    labels: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    targets: np.ndarray
    hits: np.ndarray
    losses: np.ndarray
    draw: np.uint64 | None

    def part(self, of):
        """Only a slice of the rows with a loss."""
        names = "rows", "targets", "hits", "losses"
        return replace(self, **{name: getattr(self, name)[of] for name in names})


class Model:
    """Weights, adapters and the arena they work in."""

    def __init__(self, config, params, run, arena, team):
        self.config, self.params, self.run, self.arena, self.team = config, params, run, arena, team
        shape = (run.seq, config.head_dim // 2)
        self.cos, self.sin = (arena.alloc(name, shape, category="input") for name in ("cos", "sin"))
        rope.tables(team, self.cos, self.sin, config.rope_theta)

    def blocks(self, inputs):
        """The decoder blocks for a batch."""
        T = inputs.shape[1]
        places = self.cos[:T], self.sin[:T], inputs.starts
        dropout = None if inputs.draw is None else Dropout(inputs.draw, self.run.dropout)
        return [Block(index, layer, self.config, inputs.shape, places, self.arena, self.team, self.run.row_tile,
                      dropout) for index, layer in enumerate(self.params.layers)]

    @contextmanager
    def inputs(self, batch, draw=None):
        """The batch in the arena, for the length of a `with` block; the forward stage begins.

        draw  key of its dropout masks; None, as in evaluation: nothing is left out
        """
        self.arena.stage("forward")
        N, n = batch.ids.size, batch.trained_tokens
        names = "ids", "labels", "starts", "rows", "targets", "hits"
        arrays = [self.arena.alloc(name, (N,), np.int32, "input") for name in names]
        losses = self.arena.alloc("losses", (N,), category="input")
        ids, labels, starts, rows, targets, hits = arrays
        for array, values in ((ids, batch.ids), (labels, batch.labels), (starts, batch.starts)):
            put(self.team, array, lambda values=values: values.reshape(-1))
        select.find(self.team, rows, targets, labels, IGNORE)
        yield Inputs(batch.ids.shape, ids, labels, starts, rows[:n], targets[:n], hits[:n], losses[:n], draw)
        for array in (*arrays, losses):
            self.arena.free(array)

    def embed(self, inputs):
        """x (N, D) of the first block; the caller frees it."""
        x = self.arena.alloc("layer.0.x", (len(inputs.ids), self.config.hidden_size))      # (N, D)
        embedding.forward(self.team, x, inputs.ids, self.params.embed.value)
        return x

    def embedding_backward(self, dx, inputs):
        """Add dx (N, D), the gradient of the first block's input, to the embedding's gradient."""
        if self.params.embed.trainable:
            embedding.backward(self.team, self.params.embed.grad, dx, inputs.ids)

    def loss(self, x, inputs, scale, gradient=True):
        """Loss stage on the last block's output x (N, D), a tile of rows with a label at a time.

        Fills inputs.losses; with `gradient` x becomes, in place, the gradient of scale * sum(losses),
        and the gradients of the final norm and the head are added to.
        """
        arena, (N, D) = self.arena, x.shape
        C = min(N, self._rows_at_once() or N)
        with (arena.scope("final"), arena.temp("rstd", (C,)) as rstd, arena.temp("chosen", (C, D)) as chosen,
              arena.temp("xn", (C, D)) as xn, arena.temp("dxn", (C if gradient else 0, D)) as dxn,
              self._scratch(C) as scratch):
            for first in range(0, len(inputs.rows), C):
                part = inputs.part(slice(first, first + C))
                tiles = [array[:len(part.rows)] for array in (rstd, chosen, xn, dxn)]
                self._loss_tile(x, part, *tiles, scratch, scale, gradient)
        if gradient:
            select.clear_ignored(self.team, x, inputs.labels, IGNORE)

    def _rows_at_once(self):
        """Rows of a tile; 0: all of them."""
        variant, size = self.run.loss_tile()
        return self.run.row_tile if variant == "vocab" else size

    @contextmanager
    def _scratch(self, C):
        """Memory for a tile of C rows: logits, and over the vocabulary a row's largest, total and shrink as well."""
        (variant, size), V = self.run.loss_tile(), self.config.vocab_size
        width, sums = (min(size, V), 3) if variant == "vocab" else (V, 0)
        with (self.arena.temp("sums", (sums, C)) as found,
              self.arena.temp("logits", (C, width), category="logits") as logits):
            yield found, logits

    def _loss_tile(self, x, part, rstd, chosen, xn, dxn, scratch, scale, gradient):
        """Losses of the rows of `part`; with `gradient` their rows of x become those of dx."""
        team, norm = self.team, self.params.norm
        select.forward(team, chosen, x, part.rows)
        rmsnorm.statistics(team, rstd, chosen, self.config.rms_norm_eps)
        rmsnorm.forward(team, xn, chosen, rstd, norm.value)
        by = self._by_vocabulary if self.run.loss_tile()[0] == "vocab" else self._by_rows
        by(xn, dxn, part, *scratch, scale, gradient)
        if not gradient:
            return
        with team.counting("backward"):
            if norm.trainable:
                rmsnorm.backward_weight(team, norm.grad, dxn, chosen, rstd)
            fill(team, xn, 0)
            rmsnorm.backward(team, xn, dxn, chosen, rstd, norm.value)            # xn has been read; now it is dx
            select.backward(team, x, xn, part.rows)

    def sum_losses(self, inputs):
        """The sum over rows, as a float; NaN in a plan."""
        with self.arena.temp("loss", (1,), np.float64) as total:
            cross_entropy.sum_losses(self.team, total, inputs.losses)
            return float(total[0])

    def _by_rows(self, x, dx, part, _, logits, scale, gradient):
        """Losses of rows x (n, D) from whole rows of logits, and dx (n, D)."""
        team, head, y = self.team, self.params.head, logits[:len(x)]
        linear.forward(team, y, x, head.value)
        if not gradient:
            cross_entropy.forward(team, part.losses, part.hits, y, part.targets)
            return
        cross_entropy.backward(team, y, part.losses, part.hits, part.targets, scale)
        with team.counting("backward"):
            if head.trainable:
                linear.backward_weight(team, head.grad, y, x)
            linear.backward_input(team, dx, y, head.value)

    def _by_vocabulary(self, x, dx, part, sums, logits, scale, gradient):
        """The same, some tokens of the vocabulary at a time."""
        largest, total, shrink = sums[:, :len(x)]
        streamed = gradient and not self.params.head.trainable
        self._sum_over_vocabulary(x, dx if streamed else None, logits, part, largest, total, shrink)
        if streamed:
            embedding.forward(self.team, x, part.targets, self.params.head.value)      # x is free now
            if self.team.compute == "bf16":
                bf16.round_rows(self.team, x)
            cross_entropy.combine(self.team, dx, x, total, scale)
        elif gradient:
            self._gradient_over_vocabulary(x, dx, logits, part, largest, scale)

    def _sum_over_vocabulary(self, x, dx, logits, inputs, largest, total, shrink):
        """Losses of rows x (n, D), and their log-sum-exp in `largest`; dx, if given, becomes sum_v e_v W_v."""
        team, head = self.team, self.params.head
        sums = (total, inputs.losses) if dx is None else (total, inputs.losses, dx)
        fill(team, largest, -np.inf)
        for array in sums:
            fill(team, array, 0)
        for first in range(0, self.config.vocab_size, logits.shape[1]):
            y = self._logit_tile(x, logits, first)
            cross_entropy.accumulate(team, y, largest, total, shrink, inputs.losses, inputs.targets, first)
            if dx is not None:
                with team.counting("backward"):
                    cross_entropy.shrink_rows(team, dx, shrink)
                    linear.backward_input(team, dx, y, head.value[first:first + y.shape[1]], add=True)
        cross_entropy.finish(team, inputs.losses, inputs.hits, largest, total)

    def _gradient_over_vocabulary(self, x, dx, logits, inputs, lse, scale):
        """dx (n, D) and the head's own gradient, from logits formed once more."""
        team, head = self.team, self.params.head
        fill(team, dx, 0)
        for first in range(0, self.config.vocab_size, logits.shape[1]):
            with team.counting("recompute"):
                y = self._logit_tile(x, logits, first)
            part = slice(first, first + y.shape[1])
            with team.counting("backward"):
                cross_entropy.gradient_tile(team, y, lse, inputs.targets, first, scale)
                linear.backward_weight(team, head.grad[part], y, x)
                linear.backward_input(team, dx, y, head.value[part], add=True)

    def _logit_tile(self, x, logits, first):
        """Logits of rows x (n, D) for the tokens from `first` on, as many as `logits` (C, W) is wide."""
        weight = self.params.head.value[first:first + logits.shape[1]]
        shape = len(x), len(weight)
        y = logits.reshape(-1)[:shape[0] * shape[1]].reshape(shape)
        linear.forward(self.team, y, x, weight)
        return y
