"""One decoder block: what its tensors are, and its forward (`block_backward.py` has the backward).

The table in `recipes` is the forward, tensor by tensor, and each line is written once:
the first pass, the replay from a checkpoint and every rebuild in the backward call it.
A method is a set of these names to keep (`methods/`).

    name    shape          what it is
    x       (N, D)         block input
    rstd1   (N,)           reciprocal root-mean-square of x
    xn1     (N, D)         normalised x
    hq hk hv (N, R)        LoRA projections of xn1
    q       (N, H*E)       queries, after bias, LoRA and rotation
    k v     (N, K*E)       keys (rotated) and values
    p       (B, H, T, T)   attention probabilities
    ctx     (N, H*E)       merged heads before o_proj
    ho      (N, R)         LoRA projection of ctx
    mid     (N, D)         the stream after attention
    rstd2   (N,)           reciprocal root-mean-square of mid
    xn2     (N, D)         normalised mid
    hg hu   (N, R)         LoRA projections of xn2
    gate up (N, F)         the two projections of the MLP
    silu    (N, F)         silu(gate)
    act     (N, F)         silu * up
    hd      (N, R)         LoRA projection of act
    out     (N, D)         the next block's x

N = B*T rows, worked on in tiles of C (`saved.py`): only what is kept, and k and v, are arrays of
all N.  A query sees no key after it, so the forward goes through the tiles from the first to the last;
and the gradients of a tile's keys are complete when all later tiles have been there, so the
backward goes from the last to the first, each tile through the whole block at once.  p and silu are
made only where a method keeps them: attention otherwise forms p in tiles of its own, and act
is formed from gate and up in one pass.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from mesp_np.ops import attention, dropout, linear, lora, noise, residual, rmsnorm, rope, swiglu
from mesp_np.saved import Recipe, Saved, tiles

NAMES = ("x rstd1 xn1 hq hk hv q k v p ctx ho mid rstd2 xn2 hg hu gate up silu act hd").split()
READS = {"q": "xn1", "k": "xn1", "v": "xn1", "o": "ctx", "gate": "xn2", "up": "xn2", "down": "act"}
HIDDEN = {"q": "hq", "k": "hk", "v": "hv", "o": "ho", "gate": "hg", "up": "hu", "down": "hd"}


@dataclass(frozen=True)
class Dropout:
    """The masks on the inputs of a batch's adapters, each with a key of its own; none is ever stored."""

    draw: np.uint64
    rate: float

    def key(self, layer, projection):
        """64 bits for one adapter."""
        return noise.key(int(self.draw), layer, list(READS).index(projection))


class Block:
    """A layer at a given batch shape.

    layer     params.Layer
    batch     (B, T)
    places    cos, sin of (T, E/2), and starts (N,): where in its row each position's text begins
    row_tile  the most rows of a tile
    dropout   Dropout, or None
    """

    def __init__(self, index, layer, config, batch, places, arena, team, row_tile, dropout=None):
        self.index, self.layer, self.config = index, layer, config
        self.arena, self.team, self.dropout = arena, team, dropout
        self.cos, self.sin, self.starts = places
        self.B, self.T = batch
        self.tiles = tiles(self.B, self.T, row_tile)

    def forward(self, x, keep=frozenset()):
        """(out, Saved): the whole block, keeping `keep` on the way."""
        saved = self._pass(x, keep, {"out"} | keep & set(NAMES))
        return saved.hand_over("out"), saved

    def through(self, x):
        """The output of a block that keeps nothing, written over its input x (N, D)."""
        return self._pass(x, frozenset(), {"out"}, {"out": "x"}).hand_over("out")

    def replay(self, x, keep):
        """Saved, from the block's input: only what is kept, and what that needs, is computed."""
        with self.team.counting("recompute"):
            return self._pass(x, keep, keep)

    def _pass(self, x, keep, goal, over=()):
        recipes = self.recipes(keep)
        saved = Saved(self.arena, self.team, recipes, keep, x, self.tiles, over)
        with self.arena.scope(f"layer.{self.index}"):
            saved.compute(goal & set(recipes))
            if "out" in goal:
                self.arena.result(saved.get("out"))
        return saved

    def recipes(self, keep=frozenset()):
        """name -> Recipe, in the order of the forward."""
        c, N = self.config, self.B * self.T
        D, F, Q, KV = c.hidden_size, c.intermediate_size, c.query_width, c.key_width
        table = {
            "rstd1": Recipe((N,), ("x",), self._statistics),
            "xn1": Recipe((N, D), ("x", "rstd1"), self._normalised(self.layer.norm1)),
            "hq": self._hidden("q"), "q": Recipe((N, Q), self._reads("q"), self._rotated("q")),
            "hk": self._hidden("k"), "k": Recipe((N, KV), self._reads("k"), self._rotated("k")),
            "hv": self._hidden("v"), "v": Recipe((N, KV), self._reads("v"), self._projected("v")),
            "p": Recipe((self.B, c.num_attention_heads, self.T, self.T), ("q", "k"), self._probabilities, seen=("k",)),
            "ctx": Recipe((N, Q), ("q", "k", "v"), self._attend, seen=("k", "v")),
            "ho": self._hidden("o"), "mid": Recipe((N, D), self._reads("o", "x"), self._added("o")),
            "rstd2": Recipe((N,), ("mid",), self._statistics),
            "xn2": Recipe((N, D), ("mid", "rstd2"), self._normalised(self.layer.norm2)),
            "hg": self._hidden("gate"), "gate": Recipe((N, F), self._reads("gate"), self._projected("gate")),
            "hu": self._hidden("up"), "up": Recipe((N, F), self._reads("up"), self._projected("up")),
            "silu": Recipe((N, F), ("gate",), self._rowwise(swiglu.silu)),
            "act": Recipe((N, F), ("gate", "up"), self._rowwise(swiglu.forward)),
            "hd": self._hidden("down"), "out": Recipe((N, D), self._reads("down", "mid"), self._added("down")),
        }
        if "p" in keep:
            table["ctx"] = Recipe((N, Q), ("p", "v"), self._rowwise(attention.context), seen=("v",))
        if "silu" in keep:
            table["act"] = Recipe((N, F), ("silu", "up"), self._rowwise(swiglu.product))
        return {name: recipe for name, recipe in table.items() if recipe}

    def _rowwise(self, op):
        """Maker that is an op alone, to which it is the same which rows these are."""
        return lambda tile, out, *inputs: op(self.team, out, *inputs)

    def _statistics(self, tile, rstd, x):
        rmsnorm.statistics(self.team, rstd, x, self.config.rms_norm_eps)

    def _normalised(self, norm):
        return lambda tile, out, x, rstd: rmsnorm.forward(self.team, out, x, rstd, norm.value)

    def _reads(self, key, *stream):
        """What y = x W^T + b + s h B^T is made from: x, the stream it is added to if any, h if there is an adapter."""
        return (READS[key], *stream) + ((HIDDEN[key],) if self.layer.linear[key].lora else ())

    def _hidden(self, key):
        """Recipe of h = x A^T (N, R), or None without an adapter."""
        adapter = self.layer.linear[key].lora

        def make(tile, h, x):
            with self.adapter_input(key, tile, x) as y:
                lora.project(self.team, h, y, adapter.A.value)

        return adapter and Recipe((self.B * self.T, len(adapter.A.value)), (READS[key],), make)

    @contextmanager
    def adapter_input(self, key, tile, x):
        """What an adapter reads: x (C, I), or with dropout x with some of its numbers left out."""
        if not self.dropout:
            yield x
            return
        with self.arena.temp("dropped", x.shape) as y:                           # (C, I)
            dropout.forward(self.team, y, x, self.dropout.key(self.index, key), self.dropout.rate,
                            tile.rows.start)
            yield y

    def _projected(self, key):
        """Maker of y = x W^T + b + s h B^T."""
        p = self.layer.linear[key]

        def make(tile, out, x, h=None):
            plus = p.lora and lora.added(h, p.lora.B.value, p.lora.scale)
            linear.forward(self.team, out, x, p.weight.value, p.bias and p.bias.value, plus)

        return make

    def _rotated(self, key):
        """Maker of the projection, turned by each row's position."""
        project = self._projected(key)

        def make(tile, out, x, h=None):
            project(tile, out, x, h)
            rope.forward(self.team, out, self.cos, self.sin, self.starts[tile.rows], tile.rows.start)

        return make

    def _added(self, key):
        """Maker of the projection plus the stream."""
        project = self._projected(key)

        def make(tile, out, x, stream, h=None):
            project(tile, out, x, h)
            residual.forward(self.team, out, stream)

        return make

    def _probabilities(self, tile, p, q, k):
        attention.probabilities(self.team, p, q, k, self.starts[tile.rows])

    def _attend(self, tile, out, q, k, v):
        B, H, T, S = shape = self.attention_shape(tile)
        with self.arena.temp("scores", (self.team.threads, attention.forward_scratch(T, S))) as scratch:
            attention.forward(self.team, out, q, k, v, self.starts[tile.rows], shape, scratch)

    def attention_shape(self, tile):
        """(B, H, T, S): the tile's sequences, heads, queries in each, and keys before their end."""
        sequences, queries = tile.sequences, tile.queries
        return (sequences.stop - sequences.start, self.config.num_attention_heads, queries.stop - queries.start,
                queries.stop)
