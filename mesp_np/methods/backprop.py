"""Exact gradients: one driver for every keep set.

    forward    x_0 = embed(ids);  x_{l+1} = block_l(x_l)         kept: the inputs x_l
    loss       dx = dL/dx_L
    backward   for l = L-1 .. 0: replay block_l from x_l, keeping the method's names;
               dx = backward of block_l;  free x_l

Without checkpoints (`store`) the forward keeps the names of every block, and nothing is
replayed.  Blocks below the lowest trained tensor keep nothing and are not differentiated.

With the fused update a layer's parameters move as soon as its gradients and the dx below
it are formed: lower layers never read them again, so the step is the same step.
"""

from contextlib import nullcontext

from mesp_np.params import members, trainable


def gradients(engine, inputs, scale, update=None):
    """Add the gradients of scale * sum(losses) to every trainable parameter; fills inputs.losses.

    engine  engine.Engine
    update  called with the parameters of a layer as soon as their gradients are complete
    """
    arena, model, method = engine.arena, engine.model, engine.method
    outside = trainable(model.params.outside)
    x, passes = _forward(engine, inputs)
    arena.stage("loss")
    engine.make_gradients(outside)
    dx = model.loss(x, inputs, scale)
    arena.free(x)
    arena.stage("backward")
    with engine.team.counting("backward"):
        while passes:
            block, x, saved = passes.pop()
            parameters = trainable(members(block.layer))
            engine.make_gradients(parameters)
            if method.checkpoint:
                saved = block.replay(x, method.keep)
            block.backward(saved, dx, below=bool(passes) or model.params.embed.trainable)
            arena.free(x)
            if update:
                update(parameters)
        model.embedding_backward(dx, inputs)
        arena.free(dx)


def _forward(engine, inputs):
    """The last block's output, and (block, x, Saved) of every block that the backward comes to."""
    arena, model, method = engine.arena, engine.model, engine.method
    keep, held = (frozenset(), "checkpoint") if method.checkpoint else (method.keep, "kept")
    x, frozen = model.embed(inputs), model.params.frozen_layers
    passes = []
    for block in model.blocks(inputs):
        if block.index < frozen:
            x = _through(arena, block, x)
            continue
        arena.rename(x, f"layer.{block.index}.x", held)
        out, saved = block.forward(x, keep)
        passes.append((block, x, saved))
        x = out
    return arena.rename(x, "final.x", "temp"), passes


def _through(arena, block, x):
    """The output of a block that keeps nothing, its input freed."""
    out, _ = block.forward(x)
    arena.free(x)
    return out


def forward_losses(engine, inputs, around=lambda parameters: nullcontext()):
    """Fill inputs.losses by a forward pass that keeps nothing.

    around  a context to compute each part of the model in, given the parameters it reads
    """
    arena, model, params = engine.arena, engine.model, engine.model.params
    with around([params.embed]):
        x = model.embed(inputs)
    for block in model.blocks(inputs):
        with around(members(block.layer)):
            x = _through(arena, block, x)
    arena.stage("loss")
    with around([params.norm, params.head]):
        model.loss(x, inputs, 1.0, gradient=False)
    arena.free(x)
