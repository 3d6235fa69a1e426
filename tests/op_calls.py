"""Every public function of every op, at a shape with many tiles, for the checks that all of them must pass."""

import numpy as np

from mesp_np.ops import (
    attention,
    bf16,
    cross_entropy,
    dropout,
    embedding,
    fill,
    linear,
    lora,
    matmul,
    noise,
    optim_steps,
    residual,
    rmsnorm,
    rope,
    rounding,
    select,
    swiglu,
)
from mesp_np.ops.cross_entropy import IGNORE


class Call:
    """op(team, **arrays, **others)

    shapes  array name -> shape
    others  numbers, integer arrays and the like
    writes  outputs whose former content must not matter
    adds    outputs that are added to; what is in neither list is an input, or worked on in place
    free    axes (`x.1`) whose size no other array fixes
    dtypes  of arrays that do not have the run's
    """

    def __init__(self, op, writes="", adds="", free="", others=(), dtypes=(), **shapes):
        self.op, self.shapes, self.others, self.dtypes = op, shapes, dict(others), dict(dtypes)
        self.writes, self.adds, self.free = writes.split(), adds.split(), free.split()

    def __repr__(self):
        return f"{self.op.__module__.rpartition('.')[2]}.{self.op.__name__}"

    def __call__(self, team, arrays):
        self.op(team, **arrays, **self.others)

    def arrays(self, make, dtype):
        """name -> make(shape, dtype)"""
        return {name: make(shape, self.dtypes.get(name, dtype)) for name, shape in self.shapes.items()}


N, D, M, R = 300, 1100, 400, 8                # rows, width, another width, rank
B, H, K, T, E = 2, 4, 2, 300, 64              # attention
C, V, W = 90, 1500, 700                       # rows with a loss, vocabulary, a tile of it
THREADS = 4                                   # scratch for so many
SCALE = {"scale": 0.5}
EPS = {"eps": 1e-6}
STARTS = {"starts": np.tile(np.where(np.arange(T) < 170, 0, 170), B).astype(np.int32)}     # two texts in a row
SHAPE = STARTS | {"shape": (B, H, T, T)}
DROPOUT = {"key": noise.key(1), "rate": 0.3}
RATES = {"rate": 0.1, "decay": 0.01, "clip": 0.5}
ADAMW = RATES | {"betas": (0.9, 0.999), "eps": 1e-8, "step": 3}
IDS = {"ids": np.arange(N, dtype=np.int32) * 7 % V}
ROWS = {"rows": np.arange(C, dtype=np.int32) * 3}
LABELS = {"labels": np.arange(C, dtype=np.int32) * 16}
TILE = LABELS | {"first": 700}
IGNORED = np.where(np.arange(N) % 3, IGNORE, 1).astype(np.int32)

QUERIES, KEYS, WHOLE = (B * T, H * E), (B * T, K * E), (B, H, T, T)
FORWARD_SCRATCH = (THREADS, attention.forward_scratch(T, T))
BACKWARD_SCRATCH = (THREADS, attention.backward_scratch(T, T, E))
ATTENTION_GRADIENTS = dict.fromkeys(("dq", "dctx", "q"), QUERIES) | dict.fromkeys(("dk", "dv", "k", "v"), KEYS)

CALLS = [
    Call(matmul.multiply, "out", out=(N, M), a=(N, D), b=(D, M)),
    Call(matmul.multiply, adds="out", others={"add": True, "scale": 0.5}, out=(N, M), a=(N, D), b=(D, M)),
    Call(linear.forward, "out", out=(N, M), x=(N, D), weight=(M, D), bias=(M,)),
    Call(linear.backward_input, "dx", dx=(N, D), dout=(N, M), weight=(M, D)),
    Call(linear.backward_weight, adds="dweight", dweight=(M, D), dout=(N, M), x=(N, D)),
    Call(linear.backward_bias, adds="dbias", free="dout.0", dbias=(D,), dout=(N, D)),
    Call(lora.project, "h", h=(N, R), x=(N, D), A=(R, D)),
    Call(lora.backward_hidden, "dh", others=SCALE, dh=(N, R), dout=(N, M), B=(M, R)),
    Call(lora.backward_params, adds="dA dB", others=SCALE,
         dA=(R, D), dB=(M, R), dh=(N, R), dout=(N, M), x=(N, D), h=(N, R)),
    Call(rmsnorm.statistics, "rstd", others=EPS, free="x.1", rstd=(N,), x=(N, D)),
    Call(rmsnorm.forward, "out", out=(N, D), x=(N, D), rstd=(N,), weight=(D,)),
    Call(rmsnorm.backward, adds="dx", dx=(N, D), dout=(N, D), x=(N, D), rstd=(N,), weight=(D,)),
    Call(rmsnorm.backward_weight, adds="dweight", dweight=(D,), dout=(N, D), x=(N, D), rstd=(N,)),
    Call(rope.tables, "cos sin", others={"base": 1e4}, cos=(T, 200), sin=(T, 200)),
    Call(rope.forward, others=STARTS, x=QUERIES, cos=(T, E // 2), sin=(T, E // 2)),
    Call(rope.backward, others=STARTS, dx=QUERIES, cos=(T, E // 2), sin=(T, E // 2)),
    Call(attention.probabilities, "p", others=STARTS, p=WHOLE, q=QUERIES, k=KEYS),
    Call(attention.context, "ctx", ctx=QUERIES, p=WHOLE, v=KEYS),
    Call(attention.forward, "ctx scratch", others=SHAPE, free="scratch.0 scratch.1",
         ctx=QUERIES, q=QUERIES, k=KEYS, v=KEYS, scratch=FORWARD_SCRATCH),
    Call(attention.backward, "dq scratch", adds="dk dv", others=SHAPE, free="scratch.0 scratch.1",
         p=WHOLE, scratch=BACKWARD_SCRATCH, **ATTENTION_GRADIENTS),
    Call(attention.backward, "dq scratch", adds="dk dv", others=SHAPE | {"p": None}, free="scratch.0 scratch.1",
         scratch=BACKWARD_SCRATCH, **ATTENTION_GRADIENTS),
    Call(swiglu.silu, "out", out=(N, D), gate=(N, D)),
    Call(swiglu.product, "act", act=(N, D), silu=(N, D), up=(N, D)),
    Call(swiglu.forward, "act", act=(N, D), gate=(N, D), up=(N, D)),
    Call(swiglu.backward, gate=(N, D), up=(N, D), dact=(N, D)),
    Call(dropout.forward, "out", others=DROPOUT, out=(N, D), x=(N, D)),
    Call(dropout.backward, adds="dx", others=DROPOUT, dx=(N, D), dout=(N, D)),
    Call(bf16.round_rows, free="x.0 x.1", dtypes={"x": np.float32}, x=(N, D)),
    Call(rounding.forward, "out", dtypes={"out": np.uint16}, out=(N, D), x=(N, D)),
    Call(residual.forward, adds="out", out=(N, D), x=(N, D)),
    Call(embedding.forward, "out", others=IDS, free="table.0", out=(N, D), table=(V, D)),
    Call(embedding.backward, adds="dtable", others=IDS, free="dtable.0", dtable=(V, D), dout=(N, D)),
    Call(select.find, dtypes=dict.fromkeys(("rows", "targets", "labels"), np.int32), others={"ignore": IGNORE},
         rows=(N,), targets=(N,), labels=(N,)),
    Call(select.forward, "chosen", others=ROWS, free="x.0", chosen=(C, D), x=(N, D)),
    Call(select.backward, others=ROWS, free="dx.0", dx=(N, D), dchosen=(C, D)),
    Call(select.clear_ignored, others={"labels": IGNORED, "ignore": IGNORE}, free="dx.1", dx=(N, D)),
    Call(cross_entropy.forward, "losses hits", others=LABELS, free="logits.1", losses=(C,), hits=(C,), logits=(C, V)),
    Call(cross_entropy.backward, "losses hits", others=LABELS | SCALE, free="logits.1",
         logits=(C, V), losses=(C,), hits=(C,)),
    Call(cross_entropy.accumulate, "shrink", others=TILE, free="logits.1",
         logits=(C, W), largest=(C,), total=(C,), shrink=(C,), losses=(C,)),
    Call(cross_entropy.shrink_rows, free="dx.1", dx=(C, D), shrink=(C,)),
    Call(cross_entropy.combine, others=SCALE, dx=(C, D), target=(C, D), total=(C,)),
    Call(cross_entropy.finish, "hits", adds="losses", losses=(C,), hits=(C,), largest=(C,), total=(C,)),
    Call(cross_entropy.gradient_tile, others=TILE | SCALE, free="logits.1", logits=(C, W), lse=(C,)),
    Call(cross_entropy.sum_losses, "total", free="losses.0", total=(1,), losses=(C,)),
    Call(noise.add_noise, "out", others=SCALE | {"key": noise.key(1, 2)}, out=(N, D), base=(N, D)),
    Call(optim_steps.sgd, others=RATES, param=(N, D), grad=(N, D)),
    Call(optim_steps.adamw, others=ADAMW, param=(N, D), grad=(N, D), first=(N, D), second=(N, D)),
    Call(optim_steps.add_squares, adds="total", free="grad.0 grad.1", total=(1,), grad=(N, D)),
    Call(fill.fill, "out", others={"value": 2.0}, free="out.0 out.1", out=(N, D)),
]
