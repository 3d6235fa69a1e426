"""quantize: a folder of codes that loads here and is nearly the model it was; what is refused leaves nothing behind."""

import json
import re

import numpy as np
import pytest

from mesp_np import quantize as quantizing
from mesp_np.checkpoint import folder, safetensors_file, weight_files
from mesp_np.cli import main
from mesp_np.ops.quant import BF16, Quantised, quantise, round_bf16
from tests import op_checks, quantised, small, tiny_tokenizer

STORED = {"bf16": BF16, "f16": np.float16, "f32": np.float32}


@pytest.fixture
def source(tmp_path):
    """A bf16 model with rows of whole groups of 32."""
    return model(tmp_path / "source")


def model(path, dtype="bf16", **changes):
    config = quantised.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, **changes)
    folder.save(path, config, small.weights(config), tiny_tokenizer.write(path.parent / "tokenizer"), dtype)
    return path


def quantize(capsys, source, out, *flags):
    assert main(["quantize", str(source), str(out), "--group-size", "32", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_becomes_codes_and_every_vector_stays(tmp_path, capsys, dtype, bits, tied, monkeypatch):
    """Scales in the dtype of the source, a few rows at a time; sizes as reported are those of the tensors."""
    monkeypatch.setattr(quantizing, "BLOCK", 700)
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 900)
    source, out = model(tmp_path / "source", dtype, tie_word_embeddings=tied), tmp_path / "out"
    result = quantize(capsys, source, out, "--bits", str(bits))
    before, after = folder.load(source), folder.load(out)
    assert (after.config.quantization.bits, after.config.quantization.group_size) == (bits, 32)
    narrow = round_bf16 if dtype == "bf16" else STORED[dtype]
    for name, stored in after.weights.items():
        if stored.ndim == 1:
            op_checks.same_bits(stored, before.weights[name])
            continue
        codes, *others = quantise(quantised.widened({name: before.weights[name]})[name], bits, 32)
        expected = Quantised(codes, *map(narrow, others), bits)
        for part, tensor in weight_files.unpack({name: expected}).items():
            op_checks.same_bits(weight_files.unpack({name: stored})[part], tensor)
    for key, checkpoint in (("bytes_before", before), ("bytes_after", after)):
        assert result[key] == sum(w.nbytes for w in checkpoint.weights.values())


def test_the_folder_says_what_mlx_reads(source, tmp_path, capsys):
    quantize(capsys, source, tmp_path / "out")
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    block = {"bits": 4, "group_size": 32, "mode": "affine"}
    assert after == before | {"quantization": block, "quantization_config": block}
    header = (tmp_path / "out" / "model.safetensors").read_bytes()[8:200]
    assert b'"__metadata__":{"format":"mlx"}' in header
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_the_same_command_writes_the_same_bytes(source, tmp_path, capsys):
    for out in ("a", "b"):
        quantize(capsys, source, tmp_path / out)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_perplexity_before_and_after(source, data, tmp_path, capsys):
    """The loss moves a little, with 8 bits by less than a hundredth; the tokens are the same."""
    found = {bits: quantize(capsys, source, tmp_path / bits, "--bits", bits, "--data", data, "--seq", "32")
             for bits in ("4", "8")}
    change = {bits: abs(r["after"]["loss"] / r["before"]["loss"] - 1) for bits, r in found.items()}
    assert 0 < change["8"] < 0.01 and 0 < change["4"] < 0.2
    assert all(r["before"]["trained_tokens"] == r["after"]["trained_tokens"] for r in found.values())
    flags = ["--group-size", "32", "--data", data, "--seq", "32"]
    assert main(["quantize", str(source), str(tmp_path / "c"), *flags]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_a_quantised_model_is_trained_and_generates(source, data, tmp_path, capsys):
    quantize(capsys, source, tmp_path / "out")
    assert main(["train", "--model", str(tmp_path / "out"), "--data", data, "--seq", "24", "--iters", "2",
                 "--run-dir", str(tmp_path / "run"), "--sample-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    assert main(["generate", "--model", str(tmp_path / "out"), "--adapter", str(tmp_path / "run" / "adapter"),
                 "--prompt", "the cat", "--max-tokens", "4"]) == 0


def refused(capsys, tmp_path, *argv):
    """The one line of a command that fails and leaves no folder `out` behind."""
    assert main(["quantize", *map(str, argv)]) == 1
    assert not list(tmp_path.glob("*out*"))
    return capsys.readouterr().err


def test_what_is_refused(source, tmp_path, capsys):
    out = tmp_path / "out"
    told = refused(capsys, tmp_path, source, out, "--group-size", "64")
    assert "rows of 96, no multiple of 64" in told and "smaller --group-size" in told
    assert "no such folder" in refused(capsys, tmp_path, tmp_path / "nowhere", out)
    assert "nothing.jsonl" in refused(capsys, tmp_path, source, out, "--group-size", "32", "--data", "nothing.jsonl")
    quantize(capsys, source, tmp_path / "done")
    assert "quantised already" in refused(capsys, tmp_path, tmp_path / "done", out)
    before = (tmp_path / "done" / "model.safetensors").read_bytes()
    assert "is there already" in refused(capsys, tmp_path, source, tmp_path / "done")
    assert (tmp_path / "done" / "model.safetensors").read_bytes() == before
    assert main(["quantize", str(source), str(source)]) == 1
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, 100, 50_000])
def test_a_full_disk_leaves_nothing(source, tmp_path, capsys, monkeypatch, full_disk, size):
    derive, out = folder.derive, tmp_path / "out"

    def derive_on_a_full_disk(*args):
        with full_disk(size):
            derive(*args)

    monkeypatch.setattr(folder, "derive", derive_on_a_full_disk)
    told = refused(capsys, tmp_path, source, out, "--group-size", "32")
    assert re.search(r"/out/\S+: cannot be written \(File too large\)", told)
    monkeypatch.undo()
    quantize(capsys, source, out)


def test_settings_are_checked_without_data_too(source, tmp_path, capsys):
    assert main(["quantize", str(source), str(tmp_path / "out"), "--seq", "0"]) == 2
    assert "--seq is 0" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [["--bits", "3"], ["--group-size", "16"]])
def test_usage(source, tmp_path, flags):
    with pytest.raises(SystemExit) as raised:
        main(["quantize", str(source), str(tmp_path / "out"), *flags])
    assert raised.value.code == 2
