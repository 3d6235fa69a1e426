"""A model's folder in Hugging Face form: config.json, weights, tokenizer.

config.json is read by config_json.py, the weights by weight_files.py; what is wrong with either
is told at once, before any weight is read.  A folder is written as a whole or not at all.
"""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mesp_np.checkpoint import chat_template, hub, safetensors_file, weight_files
from mesp_np.checkpoint.atomic import new_folder
from mesp_np.checkpoint.hub import COMPANIONS, CONFIG
from mesp_np.checkpoint.safetensors_file import PACKED
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.checkpoint.weight_files import WEIGHTS
from mesp_np.config import ModelConfig
from mesp_np.config_json import LARGEST
from mesp_np.errors import UserError, refuse
from mesp_np.json_file import read_object, write_object
from mesp_np.ops.quant import BF16

STORED = {"bf16": ("bfloat16", BF16), "f16": ("float16", np.float16), "f32": ("float32", np.float32)}


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to use.

    weights  checkpoint name -> stored array or Quantised, mapped and read-only, in config.weight_shapes()' order
    eos_ids  the tokens that end a generated text, from generation_config.json or else config.json
    notes    what was ignored, in words
    """

    folder: Path
    config: ModelConfig
    weights: dict
    eos_ids: frozenset
    notes: tuple

    @property
    def name(self):
        """What an adapter calls its base model: OWNER/NAME on the hub, or else the folder."""
        return hub.name_of(self.folder)

    @cached_property
    def tokenizer(self):
        """The folder's tokenizer, read when first asked for."""
        return Tokenizer(self.folder, self.config.vocab_size)

    @cached_property
    def chat(self):
        """The folder's ChatTemplate, read when first asked for, or None."""
        return chat_template.find(self.folder)


def default_folder():
    """The folder of the small model that comes along: inside the installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "weights"
    return installed if installed.is_dir() else package.with_name("weights")


def load(name):
    """Checkpoint of a folder, or of a model of the Hugging Face hub.  Raises UserError listing every problem."""
    folder = hub.find(name)
    config, headers = _read_both(folder)
    weights, notes = weight_files.load(folder, config, headers)
    return Checkpoint(folder, config, weights, _eos_ids(folder), tuple(notes))


def save(folder, config, weights, tokenizer_folder, dtype="bf16"):
    """Write a complete folder that transformers loads too, atomically.

    weights           checkpoint name -> array, float32 or a stored form
    tokenizer_folder  where the tokenizer's files, and generation_config.json if any, are copied from
    dtype             bf16 (rounded to nearest even), f16 or f32
    """
    name, stored = STORED[dtype]
    eos = {"eos_token_id": Tokenizer(tokenizer_folder, config.vocab_size).eos_id}
    with new_folder(folder) as fresh:
        write_object(fresh / CONFIG, config.to_json() | eos | {"torch_dtype": name})
        write_object(fresh / "generation_config.json", eos)
        _copy_companions(Path(tokenizer_folder), fresh)
        safetensors_file.write(fresh / WEIGHTS, weights, stored)


def derive(out, source, weights, changes=()):
    """Write a folder like `source` with other weights, atomically: the same config.json, tokenizer, template, licence.

    weights  checkpoint name -> array, Quantised, or what safetensors_file.write takes; stored as it is
    changes  key of config.json -> its new value, or None to remove it
    """
    changes, tensors = dict(changes), weight_files.unpack(weights)
    kept = {key: value for key, value in read_object(Path(source) / CONFIG).items() if key not in changes}
    writer = "mlx" if any(tensor.dtype == PACKED for tensor in tensors.values()) else "pt"
    with new_folder(out) as fresh:
        write_object(fresh / CONFIG, kept | {key: value for key, value in changes.items() if value is not None})
        _copy_companions(Path(source), fresh)
        safetensors_file.write(fresh / WEIGHTS, tensors, writer=writer)


def _read_both(folder):
    """(ModelConfig, headers of the weight files), or one UserError with the problems of both."""
    found, errors = [], []
    for read in (ModelConfig.from_folder, weight_files.read_headers):
        try:
            found.append(read(folder))
        except UserError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    refuse(folder, [str(error) for error in errors], "see below")
    return found


def _copy_companions(source, target):
    """All that belongs to a model besides config.json and the weights."""
    found = (path for pattern in COMPANIONS for path in sorted(source.glob(pattern)))
    for path in filter(Path.is_file, found):               # LICENSE* may also name a folder
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def eos_ids(path):
    """The eos_token_id of a JSON file as a list, or None when there is none.  Raises UserError."""
    ids = read_object(path).get("eos_token_id") if path.exists() else None
    ids = ids if isinstance(ids, list) or ids is None else [ids]
    if not all(type(index) is int and 0 <= index < LARGEST for index in ids or []):
        raise UserError(f"{path}: eos_token_id is {ids}", "it must be the number of a token or a list of them")
    return ids


def _eos_ids(folder):
    """The ids that end a text, from generation_config.json or else config.json."""
    ids = eos_ids(folder / "generation_config.json")
    return frozenset(ids if ids is not None else eos_ids(folder / CONFIG) or ())
