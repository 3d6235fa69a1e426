"""LoRA adapters on disk, in PEFT's format.

    adapter_config.json          rank, alpha, the projections adapted
    adapter_model.safetensors    base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight (R, in),
                                 ...lora_B.weight (out, R), and so on, in float32

The first `base_model.model.` is PEFT's wrapper, the second `model.` belongs to the
checkpoint's names.  The same adapter gives the same bytes.

Loading is strict: PEFT leaves out names that match nothing, and the "adapted" model
then answers like its base.  Settings that change the result and are not computed here are
refused by name.  lora_dropout is not: it only acts in PEFT's own training.

Source    peft, tuners/lora/config.py and utils/save_and_load.py
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mesp_np.checkpoint import safetensors_file
from mesp_np.checkpoint.atomic import new_folder
from mesp_np.config import PROJECTIONS
from mesp_np.errors import UserError, refuse
from mesp_np.json_file import read_object, write_object
from mesp_np.ops.quant import widen

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
READ = {"r", "lora_alpha", "target_modules", "use_rslora", "base_model_name_or_path", "peft_type"}
WITHOUT_EFFECT = {"task_type", "inference_mode", "peft_version", "revision", "auto_mapping", "lora_dropout",
                  "layers_pattern", "megatron_core", "qalora_group_size"}
FRESH_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base model


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter says of itself: settings of a RunConfig, and the name of its base model."""

    rank: int
    alpha: float
    targets: tuple
    rslora: bool
    base_name: str | None


def save(folder, parameters, run, base_name):
    """Write the adapter folder, atomically.

    parameters  the adapter's, named `layers.0.self_attn.q_proj.lora_A`
    base_name   the folder or the name of the model it was trained on
    """
    alpha = int(run.alpha) if run.alpha == int(run.alpha) else run.alpha
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base_name),
              "r": run.rank, "lora_alpha": alpha, "lora_dropout": 0.0, "use_rslora": run.rslora, "use_dora": False,
              "target_modules": sorted(run.targets), "modules_to_save": None, "bias": "none",
              "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True}
    with new_folder(folder) as fresh:
        write_object(fresh / CONFIG, config)
        safetensors_file.write(fresh / WEIGHTS, {_peft_name(p): p.value for p in parameters}, np.float32)


def load(folder, parameters, run):
    """Fill the parameters of a run from an adapter stored as bf16, f16 or f32.

    Raises UserError listing every difference; the parameters are then untouched.
    """
    path = Path(folder) / WEIGHTS
    settings = _setting_differences(read_config(folder), run)
    entries = safetensors_file.read_header(path)
    shapes = {_peft_name(p): p.value.shape for p in parameters}
    refuse(folder, settings + safetensors_file.differences(entries, shapes), "the adapter does not fit this run")
    stored = safetensors_file.map_tensors(path, entries)
    for p in parameters:
        widen(p.value, stored[_peft_name(p)])


def read_config(folder):
    """AdapterConfig of a folder.  Raises UserError listing what is not computed here."""
    path = Path(folder) / CONFIG
    raw = read_object(path)
    if raw.get("peft_type") != "LORA":
        dialect = "an mlx-lm adapter" if "fine_tune_type" in raw else f"peft_type is {raw.get('peft_type')!r}"
        raise UserError(f"{path}: {dialect}", "only PEFT's LORA format is read")
    refuse(path, _refused_settings(raw), "this engine does not compute such an adapter")
    targets = PROJECTIONS if raw["target_modules"] == "all-linear" else raw["target_modules"]
    return AdapterConfig(raw["r"], float(raw["lora_alpha"]), tuple(name for name in PROJECTIONS if name in targets),
                         bool(raw.get("use_rslora")), raw.get("base_model_name_or_path"))


def _peft_name(parameter):
    return f"base_model.model.model.{parameter.name}.weight"


def _refused_settings(raw):
    """Settings that are wrong, or on and not computed here, in words."""
    problems = []
    if type(raw.get("r")) is not int or raw["r"] < 1:
        problems.append(f"r is {raw.get('r')!r}, expected a positive whole number")
    if type(raw.get("lora_alpha")) not in (int, float) or not 0 < raw["lora_alpha"] < float("inf"):
        problems.append(f"lora_alpha is {raw.get('lora_alpha')!r}, expected a positive number")
    targets = raw.get("target_modules")
    listed = isinstance(targets, list) and targets and all(name in PROJECTIONS for name in targets)
    if not listed and targets != "all-linear":
        problems.append(f"target_modules is {targets!r}, expected a list from {', '.join(PROJECTIONS)}")
    for key in sorted(raw.keys() - READ - WITHOUT_EFFECT):
        allowed = raw[key] in FRESH_STARTS if key == "init_lora_weights" else raw[key] in (None, False, "none", {}, [])
        if not allowed:
            problems.append(f"{key} is {raw[key]!r}")
    return problems


def _setting_differences(config, run):
    pairs = {"rank": (config.rank, run.rank), "alpha": (config.alpha, run.alpha),
             "rslora": (config.rslora, run.rslora), "targets": (sorted(config.targets), sorted(run.targets))}
    return [f"{name} is {theirs}, the run has {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]
