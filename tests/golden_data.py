"""The golden files of tools/make_golden.py as engine inputs."""

import json
from pathlib import Path

import numpy as np

from mesp_np.batch import Batch
from mesp_np.config import ModelConfig, RunConfig
from mesp_np.engine import Engine, plan_step

FOLDER = Path(__file__).parent / "golden"


def load(name):
    """Arrays of one golden file, by key."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def config(golden):
    return ModelConfig.from_json(json.loads(str(golden["config"])))


def weights(tied):
    """Checkpoint name -> float64 array."""
    golden = load("lora_tied" if tied else "lora_untied")
    return {key.removeprefix("weight/"): value for key, value in golden.items() if key.startswith("weight/")}


def batch(golden):
    return Batch.of(golden["ids"], golden["labels"])


def run_config(**changes):
    """float64, r=4, alpha=8 on all seven, as the golden adapters were made."""
    settings = {"batch_size": 2, "seq": 9, "rank": 4, "alpha": 8.0, "dtype": "float64", "loss": "rows:4"}
    return RunConfig(**(settings | changes))


def engine(tied=True, **changes):
    """An engine on a golden model, with the golden adapters when it trains adapters.

    The arena is exactly as large as the plan says, and poisoned.
    """
    golden = load("lora_tied" if tied else "lora_untied")
    run = run_config(**changes)
    stored = {name: value.astype(run.dtype) for name, value in weights(tied).items()}
    plan = plan_step(config(golden), run, weights=stored)
    made = Engine(config(golden), stored, run, plan.extent_bytes, poison=True)
    for parameter in made.parameters:
        if "lora/" + parameter.name in golden:
            parameter.value[:] = golden["lora/" + parameter.name]
    return made
