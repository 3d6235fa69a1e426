"""Exact gradients: one driver for every keep set.

    forward    x_0 = embed(ids);  x_{l+1} = block_l(x_l)         kept: the inputs x_l
    loss       dx = dL/dx_L, in place of x_L
    backward   for l = L-1 .. 0: replay block_l from x_l, keeping the method's names;
               dx = backward of block_l;  free x_l

Without checkpoints (`store`, and the last `stored_layers` layers of any method) the forward keeps names
of a block, and the backward replays nothing.  With a checkpoint every k layers, the inputs of the k - 1
blocks above it are made again when the backward comes to them: k - 1 of k forwards more, and L/k + k
inputs at once instead of L.  Blocks below the lowest trained tensor keep nothing and are not differentiated.

With the fused update a layer's parameters move as soon as its gradients and the dx below
it are formed: lower layers never read them again, so the step is the same step.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from mesp_np.block import Block
from mesp_np.block_backward import backward
from mesp_np.methods import checkpoints, store_lean
from mesp_np.params import members, trainable
from mesp_np.saved import Saved


@dataclass
class Pass:
    """What the forward leaves of a block.

    take   gives back its input, which its caller frees; None: to be made from the checkpoint below
    saved  what it keeps; None: to be replayed
    """

    block: Block
    take: Callable | None
    saved: Saved | None


def gradients(engine, inputs, scale, update=None):
    """Add the gradients of scale * sum(losses) to every trainable parameter; fills inputs.losses.

    engine  engine.Engine
    update  called with the parameters of a layer as soon as their gradients are complete
    """
    arena, model = engine.arena, engine.model
    x, passes = _forward(engine, inputs)
    arena.stage("loss")
    engine.make_gradients(trainable(model.params.outside))
    model.loss(x, inputs, scale)
    dx = arena.rename(x, "dx")
    arena.stage("backward")
    with engine.team.counting("backward"):
        while passes:
            _backward(engine, passes, dx, update)
        model.embedding_backward(dx, inputs)
        arena.free(dx)


def _backward(engine, passes, dx, update):
    """Take the last of the passes, and turn dx (N, D), the gradient of its output, into that of its input."""
    if not passes[-1].take:
        _remake_inputs(engine, passes)
    last = passes.pop()
    parameters = trainable(members(last.block.layer))
    engine.make_gradients(parameters)
    x = last.take()
    saved = last.saved or last.block.replay(x, engine.method.keep)
    backward(last.block, saved, dx, below=bool(passes) or engine.model.params.embed.trainable)
    engine.arena.free(x)
    if update:
        update(parameters)


def _forward(engine, inputs):
    """The last block's output, and the Pass of every block that the backward comes to."""
    arena, model = engine.arena, engine.model
    x, frozen = model.embed(inputs), model.params.frozen_layers
    passes = []
    for block in model.blocks(inputs):
        if block.index < frozen:
            x = block.through(x)
            continue
        keep = _kept(engine, block.index)
        if not keep and (block.index - frozen) % engine.run.checkpoint_every:
            passes.append(Pass(block, None, None))
            x = block.through(x)
            continue
        arena.rename(x, f"layer.{block.index}.x", "kept" if keep else "checkpoint")
        out, saved = block.forward(x, keep)
        take = checkpoints.in_memory(x) if keep else engine.checkpoints.put(block.index, x)
        passes.append(Pass(block, take, saved if keep else None))
        x = out
    return arena.rename(x, "final.x", "temp"), passes


def _kept(engine, index):
    """The names that a block keeps from the forward on; none, if it is checkpointed."""
    if not engine.method.checkpoint:
        return engine.method.keep
    return store_lean.KEEP if index >= engine.config.num_hidden_layers - engine.run.stored_layers else frozenset()


def _remake_inputs(engine, passes):
    """The inputs of the blocks on top, by forwards from the last checkpoint."""
    first = max(index for index, one in enumerate(passes) if one.take)
    x = passes[first].take()
    for below, above in zip(passes[first:], passes[first + 1:]):
        below.take = checkpoints.in_memory(x)
        with engine.team.counting("recompute"):
            x, _ = below.block.forward(x)
        engine.arena.rename(x, f"layer.{above.block.index}.x", "checkpoint")
    passes[-1].take = checkpoints.in_memory(x)


def forward_losses(engine, inputs, around=lambda parameters: nullcontext()):
    """Fill inputs.losses by a forward pass that keeps nothing.

    around  a context to compute each part of the model in, given the parameters it reads
    """
    arena, model, params = engine.arena, engine.model, engine.model.params
    with around([params.embed]):
        x = model.embed(inputs)
    for block in model.blocks(inputs):
        with around(members(block.layer)):
            x = block.through(x)
    arena.stage("loss")
    with around([params.norm, params.head]):
        model.loss(x, inputs, 1.0, gradient=False)
    arena.free(x)
