"""One decoder block: what its tensors are, its forward, and its backward.

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

N = B*T rows, of which `row_tile` are worked on at a time (`saved.py`): only what is kept, and
q, k, v and ctx, which attention reads and makes across rows, are arrays of all N.  p and silu are
made only where a method keeps them: attention otherwise forms p in tiles of its own, and act is
formed from gate and up in one pass.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np

from mesp_np.ops import attention, dropout, linear, lora, noise, residual, rmsnorm, rope, swiglu
from mesp_np.ops.fill import fill
from mesp_np.saved import Recipe, Saved, closure, last_readers

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
    row_tile  rows that are worked on at a time
    dropout   Dropout, or None
    """

    def __init__(self, index, layer, config, batch, places, arena, team, row_tile, dropout=None):
        self.index, self.layer, self.config = index, layer, config
        self.arena, self.team, self.dropout = arena, team, dropout
        self.cos, self.sin, self.starts = places
        self.B, self.T = batch
        self.rows = self.B * self.T
        self.tiles = [slice(first, min(first + row_tile, self.rows)) for first in range(0, self.rows, row_tile)]

    def forward(self, x, keep=frozenset()):
        """(out, Saved): the whole block, keeping `keep` on the way."""
        saved = self._pass(x, keep, {"out"} | keep & set(NAMES))
        return saved.hand_over("out"), saved

    def replay(self, x, keep):
        """Saved, from the block's input: only what is kept, and what that needs, is computed."""
        with self.team.counting("recompute"):
            return self._pass(x, keep, keep)

    def _pass(self, x, keep, goal):
        recipes = self.recipes(keep)
        saved = Saved(self.arena, self.team, recipes, keep, x, self.tiles)
        with self.arena.scope(f"layer.{self.index}"):
            saved.compute(goal & set(recipes))
            if "out" in goal:
                self.arena.result(saved.get("out"))
        return saved

    def recipes(self, keep=frozenset()):
        """name -> Recipe, in the order of the forward."""
        c, N = self.config, self.rows
        D, F, Q, KV = c.hidden_size, c.intermediate_size, c.query_width, c.key_width
        table = {
            "rstd1": Recipe((N,), ("x",), self._statistics),
            "xn1": Recipe((N, D), ("x", "rstd1"), self._normalised(self.layer.norm1)),
            "hq": self._hidden("q"), "q": Recipe((N, Q), self._reads("q"), self._rotated("q")),
            "hk": self._hidden("k"), "k": Recipe((N, KV), self._reads("k"), self._rotated("k")),
            "hv": self._hidden("v"), "v": Recipe((N, KV), self._reads("v"), self._projected("v")),
            "p": Recipe(self._attention_shape(), ("q", "k"), self._probabilities, across=True),
            "ctx": Recipe((N, Q), ("q", "k", "v"), self._attend, across=True),
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
            table["ctx"] = Recipe((N, Q), ("p", "v"), self._rowwise(attention.context), across=True)
        if "silu" in keep:
            table["act"] = Recipe((N, F), ("silu", "up"), self._rowwise(swiglu.product))
        return {name: recipe for name, recipe in table.items() if recipe}

    def _rowwise(self, op):
        """Maker that is an op alone, to which it is the same which rows these are."""
        return lambda rows, out, *inputs: op(self.team, out, *inputs)

    def _statistics(self, rows, rstd, x):
        rmsnorm.statistics(self.team, rstd, x, self.config.rms_norm_eps)

    def _normalised(self, norm):
        return lambda rows, out, x, rstd: rmsnorm.forward(self.team, out, x, rstd, norm.value)

    def _reads(self, key, *stream):
        """What y = x W^T + b + s h B^T is made from: x, the stream it is added to if any, h if there is an adapter."""
        return (READS[key], *stream) + ((HIDDEN[key],) if self.layer.linear[key].lora else ())

    def _hidden(self, key):
        """Recipe of h = x A^T (N, R), or None without an adapter."""
        adapter = self.layer.linear[key].lora

        def make(rows, h, x):
            with self._adapter_input(key, rows, x) as y:
                lora.project(self.team, h, y, adapter.A.value)

        return adapter and Recipe((self.rows, len(adapter.A.value)), (READS[key],), make)

    @contextmanager
    def _adapter_input(self, key, rows, x):
        """What an adapter reads: rows x (C, I), or with dropout x with some of its numbers left out."""
        if not self.dropout:
            yield x
            return
        with self.arena.temp("dropped", x.shape) as y:                           # (C, I)
            dropout.forward(self.team, y, x, self.dropout.key(self.index, key), self.dropout.rate, rows.start)
            yield y

    def _projected(self, key):
        """Maker of y = x W^T + b + s h B^T."""
        p = self.layer.linear[key]

        def make(rows, out, x, h=None):
            linear.forward(self.team, out, x, p.weight.value, p.bias and p.bias.value)
            if p.lora:
                lora.forward(self.team, out, h, p.lora.B.value, p.lora.scale)

        return make

    def _rotated(self, key):
        """Maker of the projection, turned by each row's position."""
        project = self._projected(key)

        def make(rows, out, x, h=None):
            project(rows, out, x, h)
            rope.forward(self.team, out, self.cos, self.sin, self.starts[rows], rows.start)

        return make

    def _added(self, key):
        """Maker of the projection plus the stream."""
        project = self._projected(key)

        def make(rows, out, x, stream, h=None):
            project(rows, out, x, h)
            residual.forward(self.team, out, stream)

        return make

    def _probabilities(self, rows, p, q, k):
        attention.probabilities(self.team, p, q, k, self.starts)

    def _attend(self, rows, out, q, k, v):
        B, H, T, S = shape = self._attention_shape()
        with self.arena.temp("tiles", (self.team.threads, attention.forward_scratch(T, S))) as tiles:
            attention.forward(self.team, out, q, k, v, self.starts, shape, tiles)

    def _attention_shape(self):
        return self.B, self.config.num_attention_heads, self.T, self.T

    def backward(self, saved, dx, below=True):
        """Turn dx (N, D), the gradient of the block's output, into that of its input, in place.

        Adds to the gradients of the layer's trainable parameters.  With below=False nothing
        under this block is trained, and the gradient of x is not formed.
        """
        with self.arena.scope(f"layer.{self.index}"):
            self._mlp_backward(saved, dx)
            self._attention_backward(saved, dx, below)
        saved.close()

    def _mlp_backward(self, saved, dx):
        """In the forward: out = mid + down(silu(gate(xn2)) * up(xn2)), xn2 = norm2(mid)."""
        with saved.whole(*saved.across("mid")):
            for rows in self.tiles:
                with saved.use("mid", rows), saved.use("rstd2", rows):
                    dxn2 = self._gated_backward(saved, rows, dx[rows])
                    self._norm_backward(self.layer.norm2, saved, rows, "mid", "rstd2", dxn2, dx[rows])
                    self.arena.free(dxn2)
        saved.release("hd", "act", "silu", "gate", "up", "hg", "hu", "xn2", "rstd2", "mid")

    def _gated_backward(self, saved, rows, dout):
        """dxn2 (C, D) of a tile of rows; the gradients of gate and up are written over them."""
        with saved.use("gate", rows) as gate, saved.use("up", rows) as up:
            dact = self._linear_backward("down", saved, rows, dout)              # (C, F)
            swiglu.backward(self.team, gate, up, dact, gate, up)
            self.arena.free(dact)
            with self._reading("xn2", saved, rows):
                dxn2 = self._linear_backward("gate", saved, rows, gate)          # (C, D)
                self._linear_backward("up", saved, rows, up, dxn2, add=True)
        return dxn2

    def _attention_backward(self, saved, dx, below):
        """In the forward: mid = x + o(attention(q, k, v)), each of q, k, v a projection of norm1(x)."""
        arena, team = self.arena, self.team
        dctx = self._context_gradient(saved, dx)                                 # (N, H*E)
        with saved.whole("q", "k", "v") as (q, k, v):
            dk = arena.alloc("dk", k.shape)                                      # (N, K*E)
            dv = arena.alloc("dv", v.shape)                                      # (N, K*E)
            B, H, T, S = shape = self._attention_shape()
            size = attention.backward_scratch(T, S, self.config.head_dim)
            with arena.temp("tiles", (team.threads, size)) as tiles:             # (threads, scratch)
                attention.backward(team, q, dk, dv, dctx, q, k, v, saved.get("p"), self.starts, shape, tiles)
            arena.free(dctx)
            for rows in self.tiles:
                self._projections_backward(saved, rows, (q[rows], dk[rows], dv[rows]), dx[rows], below)
            arena.free(dk)
            arena.free(dv)
        saved.release("q", "k", "v", "p", "hq", "hk", "hv", "xn1", "rstd1")

    def _context_gradient(self, saved, dx):
        """dctx (N, H*E), written over ctx if that is there; the caller frees it."""
        needed = ["ctx"] if _needs_input(self.layer.linear["o"]) else []
        with saved.whole(*needed):
            dctx = saved.claim("ctx")
            for rows in self.tiles:
                self._linear_backward("o", saved, rows, dx[rows], dctx[rows])
            saved.hand_over("ctx")
        saved.release("ho")
        return self.arena.rename(dctx, "dctx", "temp")

    def _projections_backward(self, saved, rows, gradients, dx, below):
        """From the gradients of rows of q, k (both still turned) and v to that of x, added to dx (C, D)."""
        dq, dk, dv = gradients
        for turned in (dq, dk):
            rope.backward(self.team, turned, self.cos, self.sin, self.starts[rows], rows.start)
        with self._reading("xn1", saved, rows):
            dxn1 = self._linear_backward("q", saved, rows, dq, want_dx=below)    # (C, D)
            self._linear_backward("k", saved, rows, dk, dxn1, add=True, want_dx=below)
            self._linear_backward("v", saved, rows, dv, dxn1, add=True, want_dx=below)
        if below:
            self._norm_backward(self.layer.norm1, saved, rows, "x", "rstd1", dxn1, dx)
            self.arena.free(dxn1)

    def _reading(self, source, saved, rows):
        """Hold rows of `source`, so that they are rebuilt once at most, if a projection that reads it is trained."""
        readers = [self.layer.linear[key] for key, name in READS.items() if name == source]
        return saved.use(source, rows) if any(map(_needs_input, readers)) else nullcontext()

    def _linear_backward(self, key, saved, rows, dout, dx=None, add=False, want_dx=True):
        """Backward of rows of y = x W^T + b + s (x A^T) B^T: parameter gradients first, then dx (C, I).

        dx is written, or added to, if it is given; else one is made and returned (its caller
        frees it).  The input is freed before dx is made, so the two are never live together.
        """
        p, source = self.layer.linear[key], READS[key]
        with self._hidden_gradient(key, dout) as dh:
            if _needs_input(p):
                with saved.use(source, rows) as x:
                    self._parameter_gradients(key, saved, rows, dout, x, dh)
            if not want_dx:
                return None
            if dx is None:
                dx = self.arena.alloc("d" + source, (len(dout), p.weight.value.shape[1]))     # (C, I)
            linear.backward_input(self.team, dx, dout, p.weight.value, add=add)
            if p.lora:
                self._adapter_backward_input(key, rows, dx, dh, p.lora.A.value)
        return dx

    def _adapter_backward_input(self, key, rows, dx, dh, A):
        """dx (C, I) += dh A; with dropout, where the forward left nothing out."""
        if not self.dropout:
            lora.backward_input(self.team, dx, dh, A)
            return
        with self.arena.temp("ddropped", dx.shape) as dy:                        # (C, I)
            fill(self.team, dy, 0)
            lora.backward_input(self.team, dy, dh, A)
            dropout.backward(self.team, dx, dy, self.dropout.key(self.index, key), self.dropout.rate, rows.start)

    @contextmanager
    def _hidden_gradient(self, key, dout):
        """dh (C, R) for the length of a `with` block; None where there is no adapter."""
        adapter = self.layer.linear[key].lora
        if not adapter:
            yield None
            return
        with self.arena.temp("d" + HIDDEN[key], (len(dout), adapter.B.value.shape[1])) as dh:     # (C, R)
            lora.backward_hidden(self.team, dh, dout, adapter.B.value, adapter.scale)
            yield dh

    def _parameter_gradients(self, key, saved, rows, dout, x, dh):
        p, team = self.layer.linear[key], self.team
        if p.lora:
            with saved.use(HIDDEN[key], rows) as h, self._adapter_input(key, rows, x) as y:
                lora.backward_params(team, p.lora.A.grad, p.lora.B.grad, dh, dout, y, h, p.lora.scale)
        if p.weight.trainable:
            linear.backward_weight(team, p.weight.grad, dout, x)
        if p.bias and p.bias.trainable:
            linear.backward_bias(team, p.bias.grad, dout)

    def _norm_backward(self, norm, saved, rows, source, statistics, dout, dx):
        with saved.use(source, rows) as x, saved.use(statistics, rows) as rstd:
            if norm.trainable:
                rmsnorm.backward_weight(self.team, norm.grad, dout, x, rstd)
            rmsnorm.backward(self.team, dx, dout, x, rstd, norm.value)


def _needs_input(linear):
    """Does the backward of a projection need its input?"""
    return bool(linear.weight.trainable or linear.lora)
