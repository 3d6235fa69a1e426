"""The reader against the safetensors library and against every way a file can be wrong; the writer's bytes."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from mesp_np.checkpoint import safetensors_file
from mesp_np.errors import UserError
from mesp_np.ops.quant import BF16, round_bf16


def file_of(path, header, data=b"", pad=0):
    """A file put together by hand: header (an object, or its text), spaces, data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_writes(tmp_path, rng):
    tensors = {"a": rng.standard_normal((3, 5)).astype(np.float32), "b": rng.standard_normal(7),
               "c": rng.standard_normal((2, 3)).astype(np.float16), "scalar": np.zeros((), np.float32),
               "empty": np.zeros((0, 4), np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    read = safetensors_file.read(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, array in read.items():
        assert array.dtype == tensors[name].dtype and array.shape == tensors[name].shape
        assert np.array_equal(array, tensors[name]) and not array.flags.writeable


def test_every_bfloat16_pattern_survives(tmp_path):
    bits = np.arange(65536, dtype=BF16).reshape(256, 256)
    safetensors_file.write(tmp_path / "x.safetensors", {"w": bits}, BF16)
    read = safetensors_file.read(tmp_path / "x.safetensors")["w"]
    assert read.dtype == BF16 and np.array_equal(read, bits)


READ = """
import hashlib
import numpy as np
from mesp_np.checkpoint import safetensors_file
from mesp_np.ops.quant import widen
stored = safetensors_file.read(sys.argv[1])["w"]
widen(dense := np.empty(stored.shape, np.float32), stored)
print(stored.dtype, hashlib.sha256(stored.tobytes() + dense.tobytes()).hexdigest())
"""
WITHOUT = "import sys; sys.modules['ml_dtypes'] = None"                              # importing it is an ImportError
STUB = "import sys, types; sys.modules['ml_dtypes'] = types.SimpleNamespace(bfloat16='<f2')"
BESIDE = "import sys, ml_dtypes" if find_spec("ml_dtypes") else STUB


def test_bfloat16_is_the_same_beside_a_module_that_teaches_it_to_numpy(tmp_path):
    """Once ml_dtypes is imported, anywhere in a process, NumPy knows a dtype of that name; nothing here asks for it."""
    bits = np.arange(65536, dtype=BF16).reshape(256, 256)
    safetensors_file.write(tmp_path / "x.safetensors", {"w": bits}, BF16)
    found = [subprocess.run([sys.executable, "-c", before + READ, str(tmp_path / "x.safetensors")], text=True,
                            capture_output=True, check=True, cwd=Path(__file__).parents[2]).stdout
             for before in (WITHOUT, BESIDE)]
    assert found[0] == found[1] and found[0].startswith("uint16 ")


@pytest.mark.parametrize("dtype, values", [("F32", np.arange(6, dtype=np.float32)), ("BF16", np.arange(6, dtype=BF16)),
                                           ("F64", np.arange(6, dtype=np.float64))])
def test_a_tensor_at_an_odd_byte(tmp_path, dtype, values):
    size = values.nbytes
    header = {"w": entry(0, size, dtype, [2, 3])}
    pad = -(len(json.dumps(header)) % 8) % 8 + 1
    read = safetensors_file.read(file_of(tmp_path / "x.safetensors", header, values.tobytes(), pad))["w"]
    assert read.flags.aligned and not read.flags.writeable and np.array_equal(read.ravel(), values)


def test_writes_the_bytes_of_the_library(tmp_path, rng):
    tensors = {"b": rng.standard_normal((3, 5)).astype(np.float32), "a": rng.standard_normal(7).astype(np.float32),
               "z\"é": np.ones(1, np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    safetensors_file.write(tmp_path / "ours", tensors, np.float32)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_writes_arrays_of_any_layout(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 64)  # several blocks an array
    base = rng.standard_normal((12, 10)).astype(np.float32)
    tensors = {"transposed": base.T, "strided": base[::3, 1::2], "fortran": np.asfortranarray(base),
               "row": np.broadcast_to(base[0], (4, 10)), "scalar": base[0, 0].reshape(()), "none": base[:0]}
    safetensors_file.write(tmp_path / "x", tensors, np.float32)
    for name, array in safetensors.numpy.load_file(tmp_path / "x").items():
        assert np.array_equal(array, tensors[name]), name


def test_converts_as_it_writes(tmp_path, rng):
    values = rng.standard_normal((5, 3))
    bits = round_bf16(values.astype(np.float32))
    safetensors_file.write(tmp_path / "narrow", {"w": values.astype(np.float32), "b": bits[0]}, BF16)
    safetensors_file.write(tmp_path / "wide", safetensors_file.read(tmp_path / "narrow"), np.float32)
    assert np.array_equal(safetensors_file.read(tmp_path / "narrow")["w"], bits)
    assert np.array_equal(round_bf16(safetensors_file.read(tmp_path / "wide")["w"]), bits)


class Lazy:
    """Rows of an array, made when asked for; how many at once is noted."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.asked = array, array.shape, array.dtype, []

    def __getitem__(self, rows):
        made = self.array[rows].copy()
        self.asked.append(made.nbytes)
        return made


def test_each_tensor_keeps_its_own_dtype(tmp_path, rng):
    """Wider numbers first, so that every tensor is aligned; names decide the rest."""
    tensors = {"half": rng.random((3, 5)).astype(np.float16), "brain": round_bf16(rng.random((3, 3))),
               "single": rng.random(7).astype(np.float32), "codes": np.arange(6, dtype=np.uint32).reshape(2, 3),
               "double": rng.random(3)}
    safetensors_file.write(tmp_path / "x", tensors, writer="mlx")
    entries = safetensors_file.read_header(tmp_path / "x", packed=True)
    assert list(entries) == ["double", "codes", "single", "brain", "half"]
    assert all(entry.begin % entry.dtype.itemsize == 0 for entry in entries.values())
    for name, array in safetensors_file.read(tmp_path / "x", packed=True).items():
        assert array.dtype == tensors[name].dtype and np.array_equal(array, tensors[name])
    with safetensors.safe_open(tmp_path / "x", "numpy") as file:
        assert file.metadata() == {"format": "mlx"} and file.get_slice("brain").get_dtype() == "BF16"
        assert np.array_equal(file.get_tensor("codes"), tensors["codes"])


@pytest.mark.parametrize("dtype", [None, BF16, np.float32])
def test_lazy_tensors_are_made_a_few_rows_at_a_time(tmp_path, rng, monkeypatch, dtype):
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 100)
    array = rng.random((12, 10)).astype(np.float32)
    lazy = Lazy(array)
    safetensors_file.write(tmp_path / "lazy", {"w": lazy, "v": Lazy(array[0])}, dtype)
    safetensors_file.write(tmp_path / "whole", {"w": array, "v": array[0]}, dtype)
    assert (tmp_path / "lazy").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sum(lazy.asked) == array.nbytes and max(lazy.asked) <= 100


def test_packed_words_only_where_they_are_expected(tmp_path):
    safetensors_file.write(tmp_path / "x", {"w": np.zeros((2, 3), np.uint32)})
    with pytest.raises(UserError, match="w is stored as U32 .packed integers, as in a quantised MLX model"):
        safetensors_file.read(tmp_path / "x")
    assert safetensors_file.read(tmp_path / "x", packed=True)["w"].dtype == np.uint32


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 988097824\n"


@pytest.mark.parametrize("content, words", [
    (b"", "is empty"),
    (LFS, "Git LFS pointer"),
    (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
    (b"\n<HTML>", "web page"),
    (b"GGUF\x03\x00\x00\x00" + bytes(100), "GGUF"),
    (b"PK\x03\x04" + bytes(100), "PyTorch"),
    (b"\xff" * 100, "no safetensors file"),
    ((100_000_001).to_bytes(8, "little") + b"{}", "no safetensors file"),
    ((5000).to_bytes(8, "little") + b"{}", "cut off within its header"),
    (b"\x02\x00", "cut off within its header"),
])
def test_other_files_are_named(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as raised:
        safetensors_file.read_header(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("header, data, words", [
    (b"nothing", b"", "header is not right"),
    (b"\xff\xfe", b"", "header is not right"),
    (b"[]", b"", "no JSON object"),
    (b'{"w": 1, "w": 2}', b"", "w stands twice"),
    ({"w": 3}, b"", "w has no proper dtype"),
    ({"w": {"dtype": "F32", "shape": [1]}}, b"", "w has no proper dtype"),
    ({"w": entry(0, 4, shape=[-1])}, bytes(4), "w has no proper dtype"),
    ({"w": entry(0, 4, shape=[1.0])}, bytes(4), "w has no proper dtype"),
    ({"w": entry(0, 4, shape="1")}, bytes(4), "w has no proper dtype"),
    ({"w": entry(0, 4, 7)}, bytes(4), "w has no proper dtype"),
    ({"w": entry(0, 4, "F8_E4M3", [4])}, bytes(4), "w is stored as F8_E4M3 .8-bit floats"),
    ({"w": entry(0, 4, "U32", [1])}, bytes(4), "w is stored as U32 .packed integers, as in a quantised MLX"),
    ({"w": entry(0, 4, "BOOL", [4])}, bytes(4), "w is stored as BOOL"),
    ({"w": entry(0, 4, "F33", [1])}, bytes(4), "w is stored as F33"),
    ({"w": entry(0, 8, shape=[3])}, bytes(8), "w has 8 bytes, which is not its shape"),
    ({"w": entry(8, 0, shape=[0])}, b"", "w has -8 bytes"),
    ({"v": entry(0, 4), "w": entry(8, 12)}, bytes(12), "w begins at byte .*, expected"),
    ({"v": entry(0, 8), "w": entry(4, 12)}, bytes(12), "w begins at byte .*, expected"),
    ({"w": entry(0, 8)}, bytes(7), "is cut off: .* bytes, expected"),
    ({"w": entry(0, 8)}, bytes(9), "belong to no tensor"),
])
def test_wrong_headers_are_named(tmp_path, header, data, words):
    path = file_of(tmp_path / "model.safetensors", header, data)
    with pytest.raises(UserError, match=words) as raised:
        safetensors_file.read_header(path)
    assert str(path) in str(raised.value)


def test_all_wrong_tensors_are_told_together(tmp_path):
    header = {"v": entry(0, 4, "I64", [1]), "w": entry(4, 8, "F8_E5M2", [4])}
    with pytest.raises(UserError, match="(?s)2 problems.*v is stored as I64.*w is stored as F8_E5M2"):
        safetensors_file.read_header(file_of(tmp_path / "x", header, bytes(8)))


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            safetensors_file.read_header(path)
