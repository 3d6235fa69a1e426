"""LoRA adapters on disk: written in PEFT's format, read in PEFT's and in mlx-lm's.

    PEFT      adapter_config.json, adapter_model.safetensors
              base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight (R, in), ...lora_B.weight (out, R)
    mlx-lm    adapter_config.json, adapters.safetensors
              model.layers.N.self_attn.q_proj.lora_a (in, R), ...lora_b (R, out)

PEFT's first `base_model.model.` is its wrapper, the second `model.` belongs to the
checkpoint's names.  mlx-lm's matrices lie the other way round, which no check of shapes
sees where the sizes happen to agree; so the dialect decides, never the shape.  What is
written has the same bytes for the same adapter.

Loading is strict: PEFT and mlx-lm leave out names that match nothing, and the "adapted"
model then answers like its base.

Source    peft, utils/save_and_load.py; mlx_lm, tuner/lora.py
"""

from pathlib import Path

import numpy as np

from mesp_np.checkpoint import safetensors_file
from mesp_np.checkpoint.adapter_config import MLX_WEIGHTS, PEFT_WEIGHTS, read_config, write_config
from mesp_np.checkpoint.atomic import new_folder
from mesp_np.errors import UserError, refuse
from mesp_np.ops.quant import widen


def save(folder, parameters, run, base_name):
    """Write the adapter folder, atomically.

    parameters  the adapter's, named `layers.0.self_attn.q_proj.lora_A`
    base_name   the folder or the name of the model it was trained on
    """
    tensors = {_peft_name(p): p.value for p in parameters}
    layers = sorted({int(p.name.split(".")[1]) for p in parameters}) if run.layers else None
    with new_folder(folder) as fresh:
        write_config(fresh, run, layers, base_name)
        safetensors_file.write(fresh / PEFT_WEIGHTS, tensors, np.float32)


def load(folder, parameters, run):
    """Fill the parameters of a run from an adapter stored as bf16, f16 or f32.

    Raises UserError listing every difference; the parameters are then untouched.
    """
    for p, stored in fitting(folder, parameters, run):
        widen(p.value, stored)


def fitting(folder, parameters, run):
    """(parameter, stored array) of all that an adapter is made of.  Raises UserError listing every difference."""
    folder, config = Path(folder), read_config(folder)
    stored = _stored(folder, config.dialect)
    name_of = _mlx_name if config.dialect == "mlx" else _peft_name
    shapes = {name_of(p): p.value.shape for p in parameters}
    refuse(folder, config.differences(run) + safetensors_file.differences(stored, shapes),
           "the adapter does not fit this run")
    return [(p, stored[name_of(p)]) for p in parameters]


def _stored(folder, dialect):
    """Tensor name -> stored array, A (R, in) and B (out, R) in both dialects."""
    if dialect == "mlx":
        tensors = safetensors_file.read(folder / MLX_WEIGHTS)
        return {name: array.T for name, array in tensors.items()}
    if not (folder / PEFT_WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise UserError(f"{folder}: has adapter_model.bin, a PyTorch file, and no {PEFT_WEIGHTS}",
                        "save the adapter again with a current PEFT")
    return safetensors_file.read(folder / PEFT_WEIGHTS)


def _peft_name(parameter):
    return f"base_model.model.model.{parameter.name}.weight"


def _mlx_name(parameter):
    module, _, side = parameter.name.rpartition("_")
    return f"model.{module}_{side.lower()}"
