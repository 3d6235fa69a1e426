"""The safetensors format: a JSON header, then the bytes of the tensors.

    8 bytes     N, the length of the header, little-endian
    N bytes     {"NAME": {"dtype": "BF16", "shape": [out, in], "data_offsets": [begin, end]}, ...},
                offsets counted from the end of the header; padded with spaces
    the rest    the tensors one after the other, row-major, little-endian, no byte unused

A file is mapped, not read: a tensor is a read-only view of it, whose pages come from the
disk when they are first used and may be dropped again, so that a checkpoint takes no
memory of its own.  Reading has two steps, so that all that is wrong can be told first:

    entries = read_header(path)               a few kilobytes, every field checked
    tensors = map_tensors(path, entries)      no bytes touched yet

NumPy has no bfloat16; such a tensor is its bits as uint16 (see ops/quant.py).  The
safetensors library knows no such form, and its release 0.8 writes wrong values for arrays
that are not contiguous; the format is small enough to write by hand.

Source    https://github.com/huggingface/safetensors, README, "Format"
"""

import json
import math
import mmap
import os
from typing import NamedTuple

import numpy as np

from mesp_np.checkpoint.atomic import new_file
from mesp_np.errors import UserError, refuse
from mesp_np.ops.quant import BF16, round_bf16, widen

PACKED = np.dtype(np.uint32)                 # words of codes, in a quantised MLX model
FLOATS = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": BF16}
DTYPES = FLOATS | {"U32": PACKED}
OTHER_DTYPES = {"F8": "8-bit floats", "F6": "6-bit floats", "F4": "4-bit floats",
                "U32": "packed integers, as in a quantised MLX model",
                "I32": "packed integers, as in a GPTQ or AWQ model",
                "U8": "bytes, as in a bitsandbytes model"}
OTHER_FILES = {b"version https://git-lfs": ("is a Git LFS pointer, the file was not downloaded", "run `git lfs pull`"),
               b"gguf": ("is a GGUF file", "use the safetensors folder of this model"),
               b"pk\x03\x04": ("is a PyTorch file", "save the model again as safetensors"),
               b"<!doctype": ("is a web page", "the download failed; download it again"),
               b"<html": ("is a web page", "the download failed; download it again")}
FORMS = {stored: form for form, stored in DTYPES.items()}
HEADER_LIMIT = 100_000_000
BLOCK_BYTES = 1 << 24
DOWNLOAD_AGAIN = "download it again"


class Entry(NamedTuple):
    """A tensor in a file: stored dtype, shape, and its bytes counted from the start of the file."""

    dtype: np.dtype
    shape: tuple
    begin: int
    end: int


def read(path, packed=False):
    """Tensor name -> read-only mapped array; `packed` as in read_header."""
    return map_tensors(path, read_header(path, packed))


def read_header(path, packed=False):
    """Tensor name -> Entry.  Raises UserError for everything the format does not allow.

    packed  U32 is allowed, as in a quantised MLX model
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(64), size)
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})", "is the folder complete?") from None
    header = _parse(path, text)
    header.pop("__metadata__", None)
    allowed = DTYPES if packed else FLOATS
    problems = [problem for name, raw in header.items() if (problem := _problem(name, raw, allowed))]
    refuse(path, problems, "use the bf16, f16 or f32 form of this model")
    entries = {name: _entry(raw, 8 + length) for name, raw in header.items()}
    _check_cover(path, entries, 8 + length, size)
    return entries


def map_tensors(path, entries):
    """Name -> read-only view of the mapped file, for the entries of its header."""
    with open(path, "rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    return {name: _view(data, entry) for name, entry in entries.items()}


def differences(entries, shapes):
    """What is missing, unexpected or of another shape, in words, against name -> shape."""
    missing = [f"{name} is missing" for name in shapes if name not in entries]
    unexpected = [f"{name} is unexpected" for name in entries if name not in shapes]
    wrong = [f"{name} has shape {entries[name].shape}, expected {tuple(shape)}"
             for name, shape in shapes.items() if name in entries and entries[name].shape != tuple(shape)]
    return missing + unexpected + wrong


def write(path, tensors, dtype=None, writer="pt"):
    """Write name -> tensor of any layout atomically, stored as `dtype`, or each as its own when that is None.

    tensors  arrays (float32, float16, BF16 or PACKED), or whatever has shape, dtype and slices of
             rows that are such arrays: those are made when their turn has come
    writer   what the file's metadata calls its format: pt or mlx

    Bytes depend on names and values alone.  Wider numbers come first, so that all are aligned.
    A few MiB at a time are made or converted, so that writing takes no second model's worth of memory.
    """
    stored = {name: np.dtype(tensor.dtype if dtype is None else dtype) for name, tensor in tensors.items()}
    names = sorted(tensors, key=lambda name: (-stored[name].itemsize, name))
    header, position = {"__metadata__": {"format": writer}}, 0
    for name in names:
        end = position + math.prod(tensors[name].shape) * stored[name].itemsize
        header[name] = {"dtype": FORMS[stored[name]], "shape": list(tensors[name].shape),
                        "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            for block in _blocks(tensors[name]):
                file.write(np.ascontiguousarray(_convert(block, stored[name])).data)


def _header_length(path, first, size):
    """The length of the header, from the first bytes of the file."""
    if not size:
        raise UserError(f"{path}: is empty", DOWNLOAD_AGAIN)
    for signature, (what, hint) in OTHER_FILES.items():
        if first.lstrip().lower().startswith(signature):
            raise UserError(f"{path}: {what}", hint)
    length = int.from_bytes(first[:8], "little")
    if length > HEADER_LIMIT:
        raise UserError(f"{path}: is no safetensors file (its header would have {length:,} bytes)", DOWNLOAD_AGAIN)
    if size < 8 + length:
        raise UserError(f"{path}: is cut off within its header", DOWNLOAD_AGAIN)
    return length


def _parse(path, text):
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: its header is not right ({error})", DOWNLOAD_AGAIN) from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: its header is no JSON object", DOWNLOAD_AGAIN)
    return header


def _each_once(pairs):
    """A dict of a JSON object's pairs, refusing a name that stands twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands twice")
    return made


def _problem(name, raw, allowed):
    """What is wrong with one entry of the header, in words; None when nothing is."""
    try:
        dtype, shape, (begin, end) = raw["dtype"], raw["shape"], raw["data_offsets"]
        right = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in [*shape, begin, end])
    except (TypeError, KeyError, ValueError):
        right = False
    if not right:
        return f"{name} has no proper dtype, shape and data_offsets"
    if dtype not in allowed:
        kind = next((kind for prefix, kind in OTHER_DTYPES.items() if dtype.startswith(prefix)), "not a float type")
        return f"{name} is stored as {dtype} ({kind})"
    if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        return f"{name} has {end - begin} bytes, which is not its shape {tuple(shape)} in {dtype}"
    return None


def _entry(raw, start):
    begin, end = raw["data_offsets"]
    return Entry(DTYPES[raw["dtype"]], tuple(raw["shape"]), start + begin, start + end)


def _check_cover(path, entries, start, size):
    """The tensors must follow each other without a gap or an overlap, to the last byte of the file."""
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.begin != position:
            raise UserError(f"{path}: {name} begins at byte {entry.begin}, expected {position}", DOWNLOAD_AGAIN)
        position = entry.end
    if position != size:
        problem = "is cut off" if size < position else "has bytes that belong to no tensor"
        raise UserError(f"{path}: {problem}: {size:,} bytes, expected {position:,}", DOWNLOAD_AGAIN)


def _view(data, entry):
    stored = data[entry.begin:entry.end]
    if entry.begin % entry.dtype.itemsize:  # other writers align nothing, and kernels need aligned numbers
        stored = stored.copy()
        stored.flags.writeable = False
    return stored.view(entry.dtype).reshape(entry.shape)


def _blocks(tensor):
    """The tensor in runs of rows of at most BLOCK_BYTES, or one row."""
    if not tensor.shape:
        tensor = tensor.reshape(1)
    rows = max(1, BLOCK_BYTES // max(1, math.prod(tensor.shape[1:]) * tensor.dtype.itemsize))
    return (tensor[first:first + rows] for first in range(0, tensor.shape[0], rows))


def _convert(array, dtype):
    """`array`, perhaps stored bfloat16, in stored form `dtype`; packed words have one form."""
    if array.dtype == dtype:
        return array
    if array.dtype == BF16:
        dense = np.empty(array.shape, np.float32)
        widen(np.atleast_2d(dense), np.atleast_2d(array))
        return _convert(dense, dtype)
    return round_bf16(array) if dtype == BF16 else array.astype(dtype)
