"""mlx-lm in MLX's build for CPUs: the step of mlx-lm's own trainer, in float32.

live   the peak of MLX's allocator, less the weights that it holds all the time
taken  growth of the resident set, with MLX's cache of freed buffers in it

Its seconds are not taken: MLX is made for another kind of processor, and its build for this one is not tuned.
"""

from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model
from safetensors.numpy import load_file

from benchmarks.agreement import EXACT, save
from benchmarks.worker import resident_growth, serve

CHECKPOINTING = "checkpointing"


class MlxLm:
    """One model; checkpointing, which mlx-lm puts into the class of its layers, is taken out again."""

    def __init__(self, spec):
        self.model, _ = load_model(Path(spec["folder"]))
        self.model.freeze()
        run = spec["run"]
        linear_to_lora_layers(self.model, len(self.model.layers),
                              {"rank": run["rank"], "scale": run["alpha"] / run["rank"], "dropout": 0.0})
        adapters = load_file(Path(spec["adapter"], "adapter_model.safetensors"))
        self.model.load_weights([(mlx_name(name), mx.array(array.T)) for name, array in adapters.items()],
                                strict=False)
        self.model.train()
        self.optimizer = optim.SGD(learning_rate=spec["rate"])
        self.tokens = mx.array([spec["tokens"]])
        self.lengths = mx.array([[0, self.tokens.shape[1]]])
        self.layer = type(self.model.layers[0])
        self.plain_call = self.layer.__call__
        self.steps = {variant: self._compiled() for variant in spec["variants"]}
        self.about = {variant: {"kind": EXACT, "timed": False} for variant in spec["variants"]}

    def step(self, variant):
        """The loss."""
        self._choose(variant)
        loss = self.steps[variant]()
        mx.eval(loss, self.model.state, self.optimizer.state)
        return loss.item()

    def gradients(self, variant, path):
        """The loss; the gradient goes into a file."""
        self._choose(variant)
        loss, gradients = self._loss_and_gradients()
        save(path, {our_name(name): np.array(grad).T for name, grad in tree_flatten(gradients)})
        return loss.item()

    def memory(self, variant):
        """Bytes of a step, adapters included."""
        mx.clear_cache()
        adapters = sum(array.nbytes for _, array in tree_flatten(self.model.trainable_parameters()))
        held = mx.get_active_memory() - adapters
        mx.reset_peak_memory()
        taken = resident_growth(lambda: self.step(variant))
        return {"live": mx.get_peak_memory() - held, "taken": taken and taken + adapters}

    def _choose(self, variant):
        self.layer.__call__ = self.plain_call
        if variant == CHECKPOINTING:
            grad_checkpoint(self.model.layers[0])

    def _loss_and_gradients(self):
        (loss, _), gradients = nn.value_and_grad(self.model, default_loss)(self.model, self.tokens, self.lengths)
        return loss, gradients

    def _compiled(self):
        state = [self.model.state, self.optimizer.state]

        @partial(mx.compile, inputs=state, outputs=state)
        def step():
            loss, gradients = self._loss_and_gradients()
            self.optimizer.update(self.model, gradients)
            return loss

        return step


def mlx_name(name):
    """base_model.model.model.layers.0.mlp.up_proj.lora_A.weight -> model.layers.0.mlp.up_proj.lora_a"""
    module, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition("_")
    return f"{module}_{side.lower()}"


def our_name(name):
    """model.layers.0.mlp.up_proj.lora_a -> layers.0.mlp.up_proj.lora_A"""
    module, _, side = name.removeprefix("model.").rpartition("_")
    return f"{module}_{side.upper()}"


if __name__ == "__main__":
    serve(MlxLm)
