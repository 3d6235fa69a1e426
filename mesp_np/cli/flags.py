"""Flags that several commands share.  Defaults stand in the config dataclasses, nowhere else."""

import argparse
import os
import re
from dataclasses import fields, replace
from pathlib import Path

from mesp_np.checkpoint import hub
from mesp_np.checkpoint.adapter_config import read_config
from mesp_np.checkpoint.folder import default_folder, load
from mesp_np.config import CHOICES, PRESETS, ModelConfig, RunConfig
from mesp_np.errors import UsageError, UserError
from mesp_np.methods import METHODS, find
from mesp_np.params import phantom_weights

RUN_HELP = {
    "method": f"one of {', '.join(METHODS)}",
    "keep": "keep these names in a block instead of the method's own, as in x,mid",
    "batch_size": "rows in a batch",
    "seq": "tokens in a row, at most",
    "rank": "LoRA rank",
    "alpha": "LoRA alpha; the adapter's output is multiplied by alpha / rank",
    "rslora": "multiply by alpha / sqrt(rank) instead",
    "dropout": "chance that a number of an adapter's input is left out, in training",
    "targets": "projections that get an adapter, as in q_proj,v_proj",
    "layers": "layers that get adapters, as in 0,3,20-23 (default: all)",
    "trainable": "adapters, or every weight",
    "loss": "rows[:C], vocab[:C] or full: how much of the logits exists at once",
    "update": "update after the backward, or fused into it",
    "optimizer": "adamw or sgd",
    "weight_decay": "weight decay",
    "clip": "largest global gradient norm; 0: no limit",
    "grad_accumulation": "batches in a step",
    "mezo_eps": "size of MeZO's perturbation",
    "probes": "MeZO estimates averaged in a step",
    "perturb": "MeZO reads copies, or perturbs in place as published",
    "dtype": "what is computed in",
    "residency": "frozen weights stay mapped as they are stored, or are widened into memory once",
    "compute": "products of the numbers as they are, or rounded to bfloat16 first",
    "row_tile": "rows that norms, projections and the MLP work on at a time",
    "stored_layers": "so many of the last layers keep what store-lean keeps, and are not replayed",
    "checkpoint_every": "layers from one kept block input to the next",
    "checkpoint_store": "block inputs in memory, in memory rounded to bfloat16, or in a temporary file",
    "threads": "worker threads (default: all cores)",
    "seed": "decides adapters, order of the data, and MeZO's noise",
}


MOST_THREADS = 8                        # that make sense on fewer cores: to see that the bits are the same


def add_config_flags(parser, config_class, help_texts):
    """A flag for each field named in `help_texts`, with the field's own default."""
    for field in fields(config_class):
        if field.name in help_texts:
            _add_flag(parser, field, help_texts[field.name])


def _add_flag(parser, field, text):
    flag, default = "--" + field.name.replace("_", "-"), field.default
    if isinstance(default, bool):
        parser.add_argument(flag, action="store_true", help=text)
        return
    if field.name == "layers":
        return _add_layer_flags(parser, text)
    kind = {tuple: _names}.get(type(default), type(default))
    shown = ",".join(default) if isinstance(default, tuple) else default
    choices = CHOICES.get(field.name)
    suffix = f" (default: {shown})" if shown != "" and field.name != "threads" else ""
    parser.add_argument(flag, type=kind, choices=choices and [c for c in choices if c != "none"], help=text + suffix,
                        metavar=None if choices else field.name.upper().replace("_", "-"))


def _add_layer_flags(parser, text):
    """--layers, and in its place --num-layers as mlx-lm has it, which counts from the end."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--layers", type=_numbers, metavar="LAYERS", help=text)
    either.add_argument("--num-layers", dest="layers", type=_last, metavar="N", help="the last N layers get adapters; "
                        "-1: all")


def given(args, config_class):
    """The fields of a config that were given on the command line."""
    names = {field.name for field in fields(config_class)}
    return {name: value for name, value in vars(args).items()
            if name in names and value is not None and value is not False}          # 0 was given, False was not


def run_config(args, **defaults):
    """RunConfig from the flags; `defaults` are a command's own, and an --adapter's settings are its own too."""
    settings = {"threads": cores()} | defaults | given(args, RunConfig)
    if getattr(args, "adapter", None):
        settings = _with_adapter(settings, defaults | given(args, RunConfig), args.adapter)
    if settings["threads"] > max(MOST_THREADS, cores()):
        raise UsageError(f"--threads is {settings['threads']}", f"this machine has {cores()} cores")
    if "method" in given(args, RunConfig):
        _expect_effect(find(settings["method"]), given(args, RunConfig))
    return RunConfig(**settings)


def _expect_effect(method, flags):
    """Refuse a flag that changes nothing with the method that is given too."""
    idle = () if method.checkpoint else ("checkpoint_store", "checkpoint_every", "stored_layers")
    idle += () if method.exact else ("update",)
    for name in idle:
        if name in flags:
            raise UsageError(f"--{name.replace('_', '-')} has no effect with --method {method.name}", "leave it out")


def _with_adapter(settings, flags, folder):
    """Settings with those of an adapter's folder: its dropout where none is set, the others in any case."""
    found = read_config(folder)
    own = {name: getattr(found, name) for name in ("rank", "alpha", "targets", "rslora")}
    expect_same(flags, own, folder, "the adapter decides")
    if settings.get("trainable") == "full":
        raise UsageError("--adapter cannot go with --trainable full", "leave one of them out")
    return {"dropout": found.dropout} | settings | own | {"layers": found.layers}    # compared in _check_layers


def expect_same(flags, own, where, why):
    """Refuse a flag that says otherwise than the settings in a file."""
    clash = [name for name in own if name in flags and _unordered(flags[name]) != _unordered(own[name])]
    if clash:
        raise UsageError(f"--{clash[0].replace('_', '-')} differs from that of {where}", f"leave it out; {why}")


def _unordered(value):
    return frozenset(value) if isinstance(value, tuple) else value


def cores():
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def add_budget_flag(parser):
    """--memory-budget, which free_knobs and the planner answer."""
    parser.add_argument("--memory-budget", type=size, metavar="SIZE", help="choose what is fastest within it, as in "
                        "96MiB, or refuse; --method, or any other flag, stays as given (default: half of the free "
                        "memory, and nothing is chosen that changes a bit of the results)")


def add_model_flag(parser, presets=False):
    """--model: a folder, or where no weights are needed a preset."""
    also = f", or, where no folder has that name, one of {', '.join(PRESETS)}" if presets else ""
    kinds = f"a folder in Hugging Face form, or OWNER/NAME on its hub{also}"
    parser.add_argument("--model", help=f"{kinds} (default: the small model that comes along)")


def checkpoint(args):
    """The Checkpoint that --model names; its notes tell when --adapter was trained on another."""
    if _is_preset(args.model):
        raise UserError(f"--model {args.model} is a preset without weights", "name a folder, or use `mesp-np plan`")
    found = load(args.model or default_folder())
    if not getattr(args, "adapter", None):
        return found
    _check_layers(args, found.config.num_hidden_layers)
    warning = read_config(args.adapter).other_base(hub.name_of(found.folder.resolve()))
    return replace(found, notes=(*found.notes, warning)) if warning else found


def config_and_weights(args):
    """(name, ModelConfig, stored arrays or phantoms) of a folder or a preset."""
    if _is_preset(args.model):
        name, config, weights = args.model, PRESETS[args.model], None
    else:
        folder = hub.find(args.model or default_folder(), weights=False)
        found = load(folder) if hub.is_whole(folder) else None
        name, weights = str(args.model or folder), found and found.weights
        config = found.config if found else ModelConfig.from_folder(folder)
    if args.adapter:
        _check_layers(args, config.num_hidden_layers)
    return name, config, weights or phantom_weights(config)


def _is_preset(name):
    """A preset's name is that of a folder where there is one."""
    return name in PRESETS and not Path(name).is_dir()


def _check_layers(args, count):
    """Refuse an --adapter on layers that a model of `count` layers has not, or that --layers says otherwise."""
    layers = read_config(args.adapter).layers
    if max(layers, default=0) >= count:
        raise UserError(f"{args.adapter}: adapts layer {max(layers)}, the model has layers 0 to {count - 1}",
                        "it belongs to another model")
    given = getattr(args, "layers", None)
    if given is not None and RunConfig(layers=given).adapted_layers(count) != frozenset(layers or range(count)):
        raise UsageError(f"the layers given differ from those of {args.adapter}", "leave them out; the adapter decides")


def expect_unused(path, flag):
    """Refuse a folder to be written that has something in it, before any work is done for it."""
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{flag} {path}: is there already", "name a new folder")


def size(text):
    """Bytes from `96MiB`, `1.5GB` or a plain number."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    made = match and int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper()))
    if not made:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 96MiB, 1.5GB or a number of bytes")
    return made


def _names(text):
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text):
    """(0, 3, 4, 5) from `0,3-5`."""
    made = []
    for part in _names(text):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        layers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not layers:
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number nor a range; write 0,3,20-23")
        made += layers
    if not made:
        raise argparse.ArgumentTypeError("names no layers; write 0,3,20-23, or leave it out for all")
    return tuple(made)


def _last(text):
    """(-2, -1) from `2`, and () from `-1`."""
    if not re.fullmatch(r"-1|[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layers; write 1 or more, or -1 for all")
    return tuple(range(-max(0, int(text)), 0))


def with_method(run, name):
    """The same run by another method, its own keep set."""
    return replace(run, method=name, keep=())
