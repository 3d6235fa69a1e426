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
"""

__version__ = "0.1.0"

from mesp_np.batch import Batch
from mesp_np.checkpoint.folder import default_folder, load
from mesp_np.config import PRESETS, ModelConfig, RunConfig
from mesp_np.engine import Engine, plan_step

__all__ = ["PRESETS", "Batch", "Engine", "ModelConfig", "RunConfig", "default_folder", "load", "plan_step"]
