"""This engine, on one stored form of the weights; a variant is a method, or `forward`, which keeps nothing."""

from dataclasses import replace

import numpy as np

from benchmarks.agreement import ESTIMATE, EXACT, LOSS, ROUNDED, save
from benchmarks.worker import resident_growth, serve
from mesp_np import Batch, Engine, RunConfig
from mesp_np.checkpoint import adapter, folder
from mesp_np.methods import METHODS

FORWARD = "forward"


class Ours:
    """Each variant has an engine of its own; they share the mapped weights."""

    def __init__(self, spec):
        self.spec, self.checkpoint = spec, folder.load(spec["form"])
        settings = {name: tuple(value) if isinstance(value, list) else value for name, value in spec["run"].items()}
        self.run = RunConfig(**settings | {"compute": spec["compute"]})
        tokens = np.array([spec["tokens"]])
        self.batch = Batch.of(tokens[:, :-1], tokens[:, 1:])
        self.engines, self.about = {}, {}
        for variant in spec["variants"]:
            self._make(variant)

    def step(self, variant):
        """The loss."""
        return self._step(self.engines[variant], variant, self.batch)

    def gradients(self, variant, path):
        """The loss; the gradient, or MeZO's estimate of it, goes into a file."""
        engine = self.engines[variant]
        if variant != FORWARD:
            save(path, engine.gradients(self.batch))
        return engine.loss(self.batch)

    def memory(self, variant):
        """Bytes of a step: live tensors, the arena, and what the process grows by with a new engine."""
        self.engines.pop(variant).team.close()
        taken = resident_growth(lambda: (self._make(variant), self.step(variant)))
        arena = self.engines[variant].arena
        return {"live": arena.ledger.live_peak, "extent": arena.extent, "taken": taken}

    def _make(self, variant):
        run = replace(self.run, method=RunConfig.method if variant == FORWARD else variant)
        config, weights = self.checkpoint.config, self.checkpoint.weights
        with Engine(config, weights, run) as plan:
            plan.team.flops.clear()
            self._step(plan, variant, Batch.phantom(self.batch.ids.shape))
            self.about[variant] = {"kind": kind(variant, run), "flops": plan.team.flops.total(), "timed": True}
            engine = Engine(config, weights, run, plan.arena.extent)
        adapter.load(self.spec["adapter"], engine.parameters, run)
        self.engines[variant] = engine

    def _step(self, engine, variant, batch):
        if variant == FORWARD:
            return engine.loss(batch)
        return engine.step([batch], self.spec["rate"]).loss


def kind(variant, run):
    """How closely a variant's gradient must agree with the reference."""
    if variant == FORWARD:
        return LOSS
    if not METHODS[variant].exact:
        return ESTIMATE
    return ROUNDED if run.compute == "bf16" or run.checkpoint_store == "bf16" else EXACT


if __name__ == "__main__":
    serve(Ours)
