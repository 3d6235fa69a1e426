"""What an adapter says of itself in its adapter_config.json: PEFT's dialect, and mlx-lm's.

    PEFT      peft_type "LORA", r, lora_alpha, lora_dropout, target_modules, layers_to_transform, ...
    mlx-lm    fine_tune_type "lora", num_layers (the last N; none above 0: all),
              lora_parameters {rank, scale, dropout, keys}

PEFT multiplies an adapter's output by alpha / r, mlx-lm by `scale` itself; so its alpha is
scale * rank.  Its keys are optional: without them every linear layer has an adapter, and
the names of the tensors say which.

Settings that change the result and are not computed here are refused by name.

Source    peft, tuners/lora/config.py; mlx_lm, lora.py and tuner/utils.py
"""

import re
from dataclasses import dataclass
from pathlib import Path

from mesp_np.checkpoint import safetensors_file
from mesp_np.config import PROJECTIONS, module_name
from mesp_np.config_json import Keys
from mesp_np.errors import UserError, refuse
from mesp_np.json_file import read_object, write_object

CONFIG, PEFT_WEIGHTS, MLX_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"
READ = {"r", "lora_alpha", "lora_dropout", "target_modules", "layers_to_transform", "use_rslora",
        "base_model_name_or_path", "peft_type"}
WITHOUT_EFFECT = {"task_type", "inference_mode", "peft_version", "revision", "auto_mapping", "megatron_core",
                  "qalora_group_size"}
HARMLESS = {"init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change the base model
            "layers_pattern": (None, "", [], "layers", ["layers"])}
OFF = (None, False, "none", {}, [])
PROJECTION_OF = {name: name for name in PROJECTIONS} | {module_name(name): name for name in PROJECTIONS}
MLX_TENSOR = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.lora_[ab]")


@dataclass(frozen=True)
class AdapterConfig:
    """Settings of a RunConfig, the name of the base model if it is told, and the dialect: "peft" or "mlx"."""

    rank: int
    alpha: float
    targets: tuple
    rslora: bool = False
    dropout: float = 0.0
    layers: tuple = ()
    base_name: str | None = None
    dialect: str = "peft"

    def differences(self, run):
        """Settings that a run has otherwise, in words.  Dropout is the run's own, and the tensors tell the layers."""
        pairs = {"rank": (self.rank, run.rank), "alpha": (self.alpha, run.alpha), "rslora": (self.rslora, run.rslora),
                 "targets": (sorted(self.targets), sorted(run.targets))}
        return [f"{name} is {theirs}, the run has {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]

    def other_base(self, model):
        """A warning when the adapter names another base model than the folder or id `model`; else nothing."""
        if self.base_name is None or _last_name(self.base_name) == _last_name(model):
            return ""
        return f"the adapter was trained on {self.base_name}, not on this model"


def read_config(folder):
    """AdapterConfig of an adapter's folder.  Raises UserError listing what is not computed here."""
    folder = Path(folder)
    path = folder / CONFIG
    _refuse_other_places(folder)
    raw = read_object(path)
    if "peft_type" not in raw and ("fine_tune_type" in raw or "lora_parameters" in raw):
        return _mlx(raw, path)
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {raw.get('peft_type')!r}",
                        "only LoRA adapters of PEFT and of mlx-lm are read")
    return _peft(raw, path)


def write_config(folder, run, layers, base_name):
    """Write PEFT's adapter_config.json for a run whose adapters are in `layers` (indices; None: in all)."""
    alpha = int(run.alpha) if run.alpha == int(run.alpha) else run.alpha
    write_object(Path(folder) / CONFIG, {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base_name),
        "r": run.rank, "lora_alpha": alpha, "lora_dropout": run.dropout, "use_rslora": run.rslora, "use_dora": False,
        "target_modules": sorted(run.targets), "layers_to_transform": layers, "modules_to_save": None, "bias": "none",
        "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True})


def _refuse_other_places(folder):
    """Say where an adapter is that is not in this folder itself."""
    if folder.is_file():
        raise UserError(f"{folder}: is a file", f"name the folder with {CONFIG}")
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}")) if not (folder / CONFIG).exists() else []
    if inside:
        raise UserError(f"{folder}: has no {CONFIG}", f"name the folder inside it: {', '.join(map(str, inside))}")


def _peft(raw, path):
    layers = raw.get("layers_to_transform")
    layers = [] if layers is None else layers if isinstance(layers, list) else [layers]
    targets = raw.get("target_modules")
    listed = list(PROJECTIONS) if targets == "all-linear" else targets
    keys = Keys(raw)
    numbers = (keys.whole("r"), keys.positive("lora_alpha", keys.get("lora_alpha")))
    rslora, dropout = keys.one_of("use_rslora", (False, True), False), _dropout(keys, "lora_dropout")
    if not _is_list_of(listed, PROJECTION_OF) or not listed:
        keys.wrong("target_modules", targets, f"a list from {', '.join(PROJECTIONS)}")
    if not all(type(index) is int and index >= 0 for index in layers):
        keys.wrong("layers_to_transform", raw["layers_to_transform"], "a list of layers from 0 on")
    keys.problems += [f"{key} is {raw[key]!r}" for key in sorted(raw.keys() - READ - WITHOUT_EFFECT)
                      if raw[key] not in HARMLESS.get(key, OFF)]
    refuse(path, keys.problems, "this engine does not compute such an adapter")
    return AdapterConfig(*numbers, _in_order(listed), rslora, dropout, tuple(layers),
                         keys.get("base_model_name_or_path"))


def _mlx(raw, path):
    kind, given = raw.get("fine_tune_type", "lora"), raw.get("lora_parameters")
    if kind != "lora" or not isinstance(given, dict):
        problem = f"fine_tune_type is {kind!r}" if kind != "lora" else "has no lora_parameters"
        raise UserError(f"{path}: {problem}", "only mlx-lm's lora adapters are read")
    modules = [match.groups() for name in safetensors_file.read_header(path.with_name(MLX_WEIGHTS))
               if (match := MLX_TENSOR.fullmatch(name))]
    keys = Keys(given)
    targets = keys.get("keys", [name for _, name in modules])
    rank, scale = keys.whole("rank"), keys.positive("scale", keys.get("scale"))
    alpha = keys.positive("scale * rank", scale * rank) if not keys.problems else None
    dropout = _dropout(keys, "dropout")
    if not _is_list_of(targets, PROJECTION_OF) or not targets:
        keys.wrong("keys", keys.get("keys"), f"a list from {', '.join(map(module_name, PROJECTIONS))}")
    if type(raw.get("num_layers")) is not int:
        keys.wrong("num_layers", raw.get("num_layers"), "a whole number")
    refuse(path, keys.problems, "this engine does not compute such an adapter")
    return AdapterConfig(rank, alpha, _in_order(targets), False, dropout, _last_layers(raw["num_layers"], modules),
                         raw.get("model"), "mlx")


def _last_layers(wanted, modules):
    """The last `wanted` layers of the model that an mlx-lm adapter was made for; () when these are all.

    The adapter's own highest layer is the model's last, since mlx-lm counts from the end.
    """
    count = 1 + max((int(index) for index, _ in modules), default=-1)
    return tuple(range(count - wanted, count)) if 0 < wanted < count else ()


def _in_order(names):
    chosen = {PROJECTION_OF[name] for name in names}
    return tuple(name for name in PROJECTIONS if name in chosen)


def _is_list_of(value, allowed):
    return isinstance(value, list) and all(isinstance(name, str) and name in allowed for name in value)


def _dropout(keys, key):
    value = keys.get(key, 0)
    if type(value) not in (int, float) or not 0 <= value < 1:
        return keys.wrong(key, value, "0 or more and below 1")
    return float(value)


def _last_name(model):
    """`Qwen2.5-0.5B` of an id Qwen/Qwen2.5-0.5B, of a folder of that name, and of its place in the hub's cache."""
    path = Path(str(model))
    if path.parent.name == "snapshots":
        path = Path(path.parent.parent.name.rpartition("--")[2])
    return path.name
