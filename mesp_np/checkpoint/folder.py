"""A model's folder in Hugging Face form: config.json, weights, tokenizer.

Weights are model.safetensors, or shards listed in model.safetensors.index.json.  All that
is wrong with them is told at once, from the headers, before any weight is read.

Two leftovers are accepted and reported in `notes`: rotary_emb.inv_freq tensors of old
releases, which are computed here, and a lm_head.weight beside tied embeddings when it is
the same to the bit.  When it differs, the folder says two things, and is refused.
"""

import shutil
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mesp_np.checkpoint import safetensors_file
from mesp_np.checkpoint.atomic import new_folder
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.config import ModelConfig
from mesp_np.errors import UserError, refuse
from mesp_np.json_file import read_object, write_object
from mesp_np.ops.quant import BF16

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STORED = {"bf16": ("bfloat16", BF16), "f32": ("float32", np.float32)}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
                   "special_tokens_map.json", "chat_template.jinja", "chat_template.json", "generation_config.json")


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to use.

    weights  checkpoint name -> stored array, mapped and read-only, as config.weight_shapes() orders them
    eos_ids  the tokens that end a generated text, from generation_config.json or else config.json
    notes    what was ignored, in words
    """

    folder: Path
    config: ModelConfig
    weights: dict
    eos_ids: frozenset
    notes: tuple

    @cached_property
    def tokenizer(self):
        """The folder's tokenizer, read when first asked for."""
        return Tokenizer(self.folder, self.config.vocab_size)


def default_folder():
    """The folder of the small model that comes along: inside the installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "weights"
    return installed if installed.is_dir() else package.with_name("weights")


def load(folder):
    """Checkpoint of a folder.  Raises UserError listing every problem of the weights."""
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    headers = _headers(folder)
    entries = {name: entry for header in headers.values() for name, entry in header.items()}
    ignored = [name for name in entries if _is_leftover(name, config)]
    needed = {name: entry for name, entry in entries.items() if name not in ignored}
    refuse(folder, _twice(headers) + safetensors_file.differences(needed, config.weight_shapes()),
           "the weights do not belong to config.json")
    tensors = {}
    for path, header in headers.items():
        tensors |= safetensors_file.map_tensors(path, header)
    if HEAD in ignored and not _same_bits(tensors[HEAD], tensors[EMBED]):
        raise UserError(f"{folder}: {HEAD} differs from {EMBED}, though config.json ties them",
                        "set tie_word_embeddings to false, or remove the tensor")
    weights = {name: tensors[name] for name in config.weight_shapes()}
    return Checkpoint(folder, config, weights, _eos_ids(folder), tuple(f"{name} is ignored" for name in ignored))


def save(folder, config, weights, tokenizer_folder, dtype="bf16"):
    """Write a complete folder that transformers loads too, atomically.

    weights           checkpoint name -> array, float32 or a stored form
    tokenizer_folder  where the tokenizer's files, and generation_config.json if any, are copied from
    dtype             bf16 (rounded to nearest even) or f32
    """
    name, stored = STORED[dtype]
    eos = {"eos_token_id": Tokenizer(tokenizer_folder, config.vocab_size).eos_id}
    with new_folder(folder) as fresh:
        write_object(fresh / "config.json", config.to_json() | eos | {"torch_dtype": name})
        write_object(fresh / "generation_config.json", eos)
        for source in (Path(tokenizer_folder) / file for file in TOKENIZER_FILES):
            if source.is_file():
                shutil.copyfile(source, fresh / source.name)
        safetensors_file.write(fresh / WEIGHTS, weights, stored)


def _headers(folder):
    """Path -> entries of each file with weights."""
    if (folder / WEIGHTS).exists():
        return {folder / WEIGHTS: safetensors_file.read_header(folder / WEIGHTS)}
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".gguf", ".pth", ".pt"))
        raise UserError(f"{folder}: has no {WEIGHTS}" + "".join(f"; {name} is not read" for name in others),
                        "download the safetensors files of this model")
    headers, problems = {}, []
    for name in _shards(folder / INDEX):
        try:
            headers[folder / name] = safetensors_file.read_header(folder / name)
        except UserError as error:
            problems.append(str(error))
    refuse(folder, problems, "download the shards again")
    return headers


def _shards(index):
    """The file names in an index, each a plain name: a downloaded file must not lead out of its folder."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{index}: has no weight_map", "download it again")
    strange = [name for name in files.values() if not isinstance(name, str) or Path(name).name != name]
    refuse(index, [f"{name!r} is no file of this folder" for name in strange], "download it again")
    return sorted(set(files.values()))


def _twice(headers):
    counts = Counter(name for header in headers.values() for name in header)
    return [f"{name} is in {count} shards" for name, count in counts.items() if count > 1]


def _is_leftover(name, config):
    return name.endswith(".rotary_emb.inv_freq") or (name == HEAD and config.tie_word_embeddings)


def _same_bits(a, b, rows=1024):
    """Whether two stored matrices are equal, some rows at a time so that no large comparison is held."""
    bits = f"u{a.dtype.itemsize}"
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
        np.array_equal(a[first:first + rows].view(bits), b[first:first + rows].view(bits))
        for first in range(0, len(a), rows))


def _eos_ids(folder):
    for path in (folder / "generation_config.json", folder / "config.json"):
        ids = read_object(path).get("eos_token_id") if path.exists() else None
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int for i in ids):
                raise UserError(f"{path}: eos_token_id is {ids}", "it must be a whole number or a list of them")
            return frozenset(ids)
    return frozenset()
