"""The weight files of a model's folder: one file or shards, stored plainly or in MLX's quantised form.

Plain     NAME.weight and NAME.bias, as bf16, f16 or f32, also mixed
Quantised a matrix is three tensors: NAME.weight, the codes as U32 words, NAME.scales and NAME.biases.
          (q_proj.bias is something else: the bias of the linear itself.)  A matrix that has no
          scales is plain, as MLX itself takes it; bits and group come from config.json.

All that is wrong is told at once, from the headers, before any weight is read.
Two leftovers are accepted: rotary_emb.inv_freq tensors of old releases, which are computed here,
and a lm_head beside tied embeddings when it is the same to the bit.  When it differs, the folder
says two things, and is refused.

Source    transformers, the index of a sharded checkpoint; mlx-lm, utils.py, load_model
"""

from collections import Counter
from pathlib import Path

import numpy as np

from mesp_np.checkpoint import safetensors_file
from mesp_np.checkpoint.safetensors_file import PACKED
from mesp_np.errors import UserError, refuse
from mesp_np.json_file import read_object
from mesp_np.ops.quant import SCALE_FORMS, Quantised, part_shapes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def read_headers(folder):
    """Path -> entries of each file with weights.  Raises UserError listing the files that cannot be read."""
    if (folder / WEIGHTS).exists():
        return {folder / WEIGHTS: safetensors_file.read_header(folder / WEIGHTS, packed=True)}
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".gguf", ".pth", ".pt"))
        raise UserError(f"{folder}: has no {WEIGHTS}" + "".join(f"; {name} is not read" for name in others),
                        "download the safetensors files of this model")
    headers, errors = {}, []
    for name in shards(folder / INDEX):
        try:
            headers[folder / name] = safetensors_file.read_header(folder / name, packed=True)
        except UserError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    refuse(folder, [error.message.removeprefix(f"{folder}/") for error in errors], "download the shards again")
    return headers


def shards(index):
    """The file names in an index, each a plain name: a downloaded file must not lead out of its folder."""
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{index}: has no weight_map", "download it again")
    strange = [name for name in files.values() if not isinstance(name, str) or Path(name).name != name
               or not name.isprintable()]
    refuse(index, [f"{name!r} is no file of this folder" for name in strange], "download it again")
    return sorted(set(files.values()))


def load(folder, config, headers):
    """(checkpoint name -> read-only array or Quantised, notes on what was ignored), from read_headers' result.

    Raises UserError listing every tensor that is missing, unexpected or not as config.json has it.
    """
    entries = {name: entry for header in headers.values() for name, entry in header.items()}
    ignored = [name for name in entries if _is_leftover(name, config)]
    needed = {name: entry for name, entry in entries.items() if name not in ignored}
    forms = {name: _form(name, shape, needed, config) for name, shape in config.weight_shapes().items()}
    refuse(folder, _twice(headers) + _problems(needed, config, forms), "the weights do not belong to config.json")
    tensors = {}
    for path, header in headers.items():
        tensors |= safetensors_file.map_tensors(path, header)
    _check_head(folder, tensors, ignored)
    weights = {name: _assemble(name, tensors, form) for name, form in forms.items()}
    return weights, [f"{name} is ignored" for name in ignored] + _size_note(folder, entries)


def unpack(weights):
    """Tensor name -> what a file holds of it: a Quantised weight becomes its three tensors."""
    tensors = {}
    for name, stored in weights.items():
        if isinstance(stored, Quantised):
            tensors |= zip(part_names(name), (stored.codes, stored.scales, stored.biases))
        else:
            tensors[name] = stored
    return tensors


def part_names(name):
    """NAME.weight, NAME.scales and NAME.biases, from the first."""
    module = name.removesuffix(".weight")
    return [name, module + ".scales", module + ".biases"]


def _form(name, shape, entries, config):
    """(bits, group) of a matrix stored as codes; None for a plain tensor."""
    coded = part_names(name)[1] in entries or (name in entries and entries[name].dtype == PACKED)
    return config.quantization.of(name) if config.quantization and coded and len(shape) == 2 else None


def _problems(entries, config, forms):
    """Every difference between the files and config.json, in words."""
    packed = [name for name, entry in entries.items() if entry.dtype == PACKED]
    if packed and not config.quantization:
        return [f"{len(packed)} tensors such as {packed[0]} are stored as U32, packed integers, "
                "but config.json has no quantization"]
    shapes, problems = {}, []
    for name, shape in config.weight_shapes().items():
        if forms[name] and shape[1] % forms[name][1]:
            problems.append(f"{name} has rows of {shape[1]}, which are no whole groups of {forms[name][1]}")
        shapes |= zip(part_names(name), part_shapes(shape, *forms[name])) if forms[name] else {name: shape}
    return problems + safetensors_file.differences(entries, shapes) + _wrong_dtypes(entries, forms)


def _wrong_dtypes(entries, forms):
    """Codes must be U32, scales and biases of one kind of float, everything else floats."""
    coded = {name for name, form in forms.items() if form}
    problems = [f"{name} is stored as {'U32, packed integers' if entry.dtype == PACKED else 'floats'}, "
                f"expected {'U32' if name in coded else 'floats'}"
                for name, entry in entries.items() if (entry.dtype == PACKED) != (name in coded)]
    for name in coded:
        scales, biases = (entries.get(part) for part in part_names(name)[1:])
        if scales and biases and (scales.dtype != biases.dtype or scales.dtype not in SCALE_FORMS):
            first, second = (safetensors_file.FORMS[part.dtype] for part in (scales, biases))
            problems.append(f"{name}: scales are {first}, biases {second}, expected both F32, F16 or BF16")
    return problems


def _assemble(name, tensors, form):
    if not form:
        return tensors[name]
    return Quantised(*(tensors[part] for part in part_names(name)), form[0])


def _twice(headers):
    counts = Counter(name for header in headers.values() for name in header)
    return [f"{name} is in {count} shards" for name, count in counts.items() if count > 1]


def _is_leftover(name, config):
    head = config.tie_word_embeddings and name in part_names(HEAD)
    return head or name.endswith(".rotary_emb.inv_freq")


def _check_head(folder, tensors, ignored):
    """A head that is stored beside tied embeddings must be the embeddings."""
    for name, twin in zip(part_names(HEAD), part_names(EMBED)):
        if name in ignored and not (twin in tensors and _same_bits(tensors[name], tensors[twin])):
            raise UserError(f"{folder}: {name} differs from {twin}, though config.json ties them",
                            "set tie_word_embeddings to false, or remove the tensor")


def _same_bits(a, b, rows=1024):
    """Whether two stored matrices are equal, some rows at a time so that no large comparison is held."""
    bits = f"u{a.dtype.itemsize}"
    return (a.dtype, a.shape) == (b.dtype, b.shape) and all(
        np.array_equal(a[first:first + rows].view(bits), b[first:first + rows].view(bits))
        for first in range(0, len(a), rows))


def _size_note(folder, entries):
    """The index of shards says how many bytes they have; when it is wrong, that does no harm."""
    if (folder / WEIGHTS).exists():
        return []
    size = sum(entry.end - entry.begin for entry in entries.values())
    metadata = read_object(folder / INDEX).get("metadata")
    said = metadata.get("total_size", size) if isinstance(metadata, dict) else size
    return [f"{INDEX} says {said} bytes, the shards have {size}"] if said != size else []
