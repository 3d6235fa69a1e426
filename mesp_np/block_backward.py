"""The backward of a decoder block, straight down, a tile of rows at a time (`saved.py`).

In the forward: mid = x + o(attention(q, k, v)) with q, k, v from norm1(x), and
out = mid + down(silu(gate(xn2)) * up(xn2)) with xn2 = norm2(mid).  The backward asks for each tensor
where it reads it, and gets what was kept, or what its recipe makes again.
"""

from contextlib import contextmanager, nullcontext

from mesp_np.block import HIDDEN, READS
from mesp_np.ops import attention, dropout, linear, lora, matmul, rmsnorm, rope, swiglu
from mesp_np.ops.fill import fill


def backward(block, saved, dx, below=True):
    """Turn dx (N, D), the gradient of a block's output, into that of its input, in place.

    Adds to the gradients of the layer's trainable parameters.  With below=False nothing
    under this block is trained, and the gradient of x is not formed.
    """
    arena = block.arena
    with arena.scope(f"layer.{block.index}"), saved.whole("k", "v") as (k, v):
        dk, dv = arena.alloc("dk", k.shape), arena.alloc("dv", v.shape)          # (N, K*E) each
        for gradient in (dk, dv):
            fill(block.team, gradient, 0)
        for tile in reversed(block.tiles):
            TileBackward(block, saved, tile).run(dx[tile.rows], (k, v), (dk, dv), below)
        arena.free(dk)
        arena.free(dv)
        saved.release()
    saved.close()


class TileBackward:
    """The backward of a tile of C rows."""

    def __init__(self, block, saved, tile):
        self.block, self.layer, self.arena, self.team = block, block.layer, block.arena, block.team
        self.saved, self.tile = saved, tile

    def run(self, dx, keys, gradients, below):
        """dx (C, D) of out becomes that of x; adds to the gradients (N, K*E) of k and v, which are `keys`."""
        held = self.use("q") if self.saved.will_read("ctx", "q") else nullcontext()       # made once, and read below
        with held, self.use("ctx"):
            self.mlp(dx)
            dctx = self.linear("o", dx)                                          # (C, H*E)
            with self.use("q") as q:
                self.attention(q, dctx, keys, gradients)
                self.arena.free(dctx)
                self.projections(q, *[gradient[self.tile.rows] for gradient in gradients], dx, below)

    def use(self, name):
        """The tile of a tensor, kept or rebuilt."""
        return self.saved.use(name, self.tile)

    def mlp(self, dx):
        """dx (C, D) of out becomes that of mid."""
        with self.use("mid"), self.use("rstd2"):
            with self.use("gate") as gate, self.use("up") as up:
                dact = self.linear("down", dx)                                   # (C, F)
                swiglu.backward(self.team, gate, up, dact)                       # their gradients, in their place
                self.arena.free(dact)
                with self.reading("xn2"):
                    dxn2 = self.linear("gate", gate)                             # (C, D)
                    self.linear("up", up, dxn2)
            self.norm(self.layer.norm2, "mid", "rstd2", dxn2, dx)
            self.arena.free(dxn2)

    def attention(self, q, dctx, keys, gradients):
        """dq over q (C, H*E), and additions to dk and dv of all keys that the tile sees."""
        block, tile = self.block, self.tile
        B, H, T, S = shape = block.attention_shape(tile)
        k, v, dk, dv = (array[tile.keys] for array in (*keys, *gradients))
        p, size = self.saved.get("p"), attention.backward_scratch(T, S, block.config.head_dim)
        with self.arena.temp("scores", (self.team.threads, size)) as scratch:
            attention.backward(self.team, q, dk, dv, dctx, q, k, v, None if p is None else tile.of(p),
                               block.starts[tile.rows], shape, scratch)

    def projections(self, dq, dk, dv, dx, below):
        """From the gradients of q, k (both still turned) and v to that of x, added to dx (C, D)."""
        block, rows = self.block, self.tile.rows
        for turned in (dq, dk):
            rope.backward(self.team, turned, block.cos, block.sin, block.starts[rows], rows.start)
        with self.reading("xn1"):
            dxn1 = self.linear("q", dq, want_dx=below)                           # (C, D)
            self.linear("k", dk, dxn1, want_dx=below)
            self.linear("v", dv, dxn1, want_dx=below)
        if below:
            self.norm(self.layer.norm1, "x", "rstd1", dxn1, dx)
            self.arena.free(dxn1)

    def reading(self, source):
        """Hold `source`, so that it is rebuilt once at most, if a projection that reads it is trained."""
        readers = [self.layer.linear[key] for key, name in READS.items() if name == source]
        return self.use(source) if any(map(_needs_input, readers)) else nullcontext()

    def linear(self, key, dout, dx=None, want_dx=True):
        """Backward of y = x W^T + b + s (x A^T) B^T: parameter gradients first, then dx (C, I).

        Adds to dx if it is given, else makes one and returns it (its caller frees it).  An input that
        is rebuilt for this alone is freed before dx is made, so the two are never live together.
        """
        p, source = self.layer.linear[key], READS[key]
        with self.hidden_gradient(key, dout) as dh:
            if _needs_input(p):
                with self.use(source) as x:
                    self.parameters(key, dout, x, dh)
            if not want_dx:
                return None
            add = dx is not None
            if not add:
                dx = self.arena.alloc("d" + source, (len(dout), p.weight.value.shape[1]))     # (C, I)
            plus = p.lora and lora.backward_added(dh, p.lora.A.value)
            linear.backward_input(self.team, dx, dout, p.weight.value, add, None if self.block.dropout else plus)
            if plus and self.block.dropout:
                self.dropped(key, dx, plus)
        return dx

    @contextmanager
    def hidden_gradient(self, key, dout):
        """dh (C, R) for the length of a `with` block; None where there is no adapter."""
        adapter = self.layer.linear[key].lora
        if not adapter:
            yield None
            return
        with self.arena.temp("d" + HIDDEN[key], (len(dout), adapter.B.value.shape[1])) as dh:     # (C, R)
            lora.backward_hidden(self.team, dh, dout, adapter.B.value, adapter.scale)
            yield dh

    def parameters(self, key, dout, x, dh):
        """Add to the gradients of a projection's parameters."""
        p, team = self.layer.linear[key], self.team
        if p.lora:
            with self.use(HIDDEN[key]) as h, self.block.adapter_input(key, self.tile, x) as y:
                lora.backward_params(team, p.lora.A.grad, p.lora.B.grad, dh, dout, y, h, p.lora.scale)
        if p.weight.trainable:
            linear.backward_weight(team, p.weight.grad, dout, x)
        if p.bias and p.bias.trainable:
            linear.backward_bias(team, p.bias.grad, dout)

    def dropped(self, key, dx, product):
        """dx (C, I) += a product, where the forward left nothing out of what an adapter reads."""
        mask = self.block.dropout
        with self.arena.temp("ddropped", dx.shape) as dy:                        # (C, I)
            matmul.multiply(self.team, dy, *product)
            dropout.backward(self.team, dx, dy, mask.key(self.block.index, key), mask.rate, self.tile.rows.start)

    def norm(self, norm, source, statistics, dout, dx):
        """dx (C, D) += the gradient through a norm; and that of its weight."""
        with self.use(source) as x, self.use(statistics) as rstd:
            if norm.trainable:
                rmsnorm.backward_weight(self.team, norm.grad, dout, x, rstd)
            rmsnorm.backward(self.team, dx, dout, x, rstd, norm.value)


def _needs_input(linear):
    """Does the backward of a projection need its input?"""
    return bool(linear.weight.trainable or linear.lora)
