"""mesp_np: exact LLM fine-tuning in little memory, counted to the byte, in NumPy and Numba.

For a notebook:

    import mesp_np
    model = mesp_np.load(mesp_np.default_folder())          # a Checkpoint: config, weights, tokenizer
    run = mesp_np.RunConfig(method="mesp", rank=8, batch_size=2, seq=64)
    plan = mesp_np.plan_step(model.config, run, weights=model.weights)
    with mesp_np.Engine(model.config, model.weights, run, plan.extent_bytes) as engine:
        result = engine.step([mesp_np.Batch.of(ids, labels)], rate=1e-3)
        gradients = engine.gradients(mesp_np.Batch.of(ids, labels))
        engine.arena.ledger.at_peak()

What is named here is imported when it is first used, so that the command line can start at once.
"""

from importlib import import_module

__version__ = "0.1.0"

PLACES = {"Batch": "batch", "default_folder": "checkpoint.folder", "load": "checkpoint.folder", "PRESETS": "config",
          "ModelConfig": "config", "RunConfig": "config", "Engine": "engine", "plan_step": "engine"}
__all__ = list(PLACES)


def __getattr__(name):
    if name not in PLACES:
        raise AttributeError(f"module mesp_np has no attribute {name!r}")
    return getattr(import_module(f"mesp_np.{PLACES[name]}"), name)


def __dir__():
    return [*globals(), *PLACES]
