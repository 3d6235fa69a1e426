"""merge: a plain folder that answers as base and adapter did, and nothing half-written."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from mesp_np.checkpoint import adapter, folder, safetensors_file
from mesp_np.cli import main
from mesp_np.ops.quant import BF16, Quantised, quantise, round_bf16
from tests import small, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder in float32: merging then changes no more than the last bits."""
    path = tiny_tokenizer.write(tmp_path_factory.mktemp("model"))
    config = small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, max_position_embeddings=64)
    folder.save(path, config, small.weights(config), path, "f32")
    return str(path)


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory, model):
    """An adapter that changes what the model says."""
    checkpoint = folder.load(model)
    path = tmp_path_factory.mktemp("adapters") / "adapter"
    with small.engine(checkpoint.config, rank=4, alpha=6.0) as engine:
        adapter.save(path, engine.parameters, engine.run, model)
    return str(path)


def merge(capsys, *argv):
    assert main(["merge", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def answer(capsys, *argv):
    assert main(["generate", "--prompt", "the cat", "--max-tokens", "12", *argv]) == 0
    return capsys.readouterr().out


def test_the_merged_folder_answers_as_the_adapter(model, adapter_folder, tmp_path, capsys):
    result = merge(capsys, "--model", model, "--adapter", adapter_folder, "--out", str(tmp_path / "merged"))
    assert result["merged"] == 14 and result["mean_change"] > 0 == result["mean_part_lost"]
    merged = folder.load(tmp_path / "merged")
    assert result["bytes"] == sum(weight.nbytes for weight in merged.weights.values())
    with_adapter = answer(capsys, "--model", model, "--adapter", adapter_folder)
    assert answer(capsys, "--model", str(tmp_path / "merged")) == with_adapter != answer(capsys, "--model", model)
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names


def test_the_report_for_a_person(model, adapter_folder, tmp_path, capsys):
    assert main(["merge", "--model", model, "--adapter", adapter_folder, "--out", str(tmp_path / "merged")]) == 0
    out = capsys.readouterr().out
    assert "14 weights" in out and "error of rounding: mean 0.0%" in out and "MiB" in out


def test_a_quantised_base_becomes_a_plain_folder(data, tmp_path, capsys):
    config = small.model_config(hidden_size=64, intermediate_size=64, num_attention_heads=8,
                                vocab_size=tiny_tokenizer.VOCAB_SIZE)
    plain = tiny_tokenizer.write(tmp_path / "plain")
    weights = small.weights(config)
    folder.save(plain, config, weights, plain)
    coded = {name: round_bf16(array) for name, array in weights.items()}
    for name, array in weights.items():
        if array.ndim == 2:
            codes, scales, biases = quantise(array, 8, 32)
            coded[name] = Quantised(codes, round_bf16(scales), round_bf16(biases), 8)
    settings = {"bits": 8, "group_size": 32}
    folder.derive(tmp_path / "mlx", plain, coded, {"quantization": settings, "quantization_config": settings})
    with small.engine(config, rank=4) as engine:
        adapter.save(tmp_path / "adapter", engine.parameters, engine.run, "mlx")
    result = merge(capsys, "--model", str(tmp_path / "mlx"), "--adapter", str(tmp_path / "adapter"),
                   "--out", str(tmp_path / "merged"))
    assert 0 < result["mean_part_lost"] < 0.1 and 0 < result["largest_part_lost"] < 0.1
    raw = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization" not in raw and "quantization_config" not in raw
    stored = safetensors_file.read(tmp_path / "merged" / "model.safetensors")
    assert set(stored) == set(config.weight_shapes()) and {array.dtype for array in stored.values()} == {BF16}
    losses = []
    for name, more in (("mlx", ("--adapter", str(tmp_path / "adapter"))), ("merged", ()), ("mlx", ())):
        assert main(["eval", "--model", str(tmp_path / name), "--data", data, *more, "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert abs(losses[0] - losses[1]) < 0.01 < 0.1 < abs(losses[0] - losses[2])


def test_places_that_are_in_use_are_refused(model, adapter_folder, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for out in (tmp_path / "full", tmp_path / "full" / "mine.txt", model, adapter_folder):
        assert main(["merge", "--model", model, "--adapter", adapter_folder, "--out", str(out)]) == 1
        assert "is there already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    merge(capsys, "--model", model, "--adapter", adapter_folder, "--out", str(tmp_path / "empty"))


def test_an_adapter_that_does_not_fit_leaves_nothing(model, adapter_folder, tmp_path, capsys):
    other = Path(shutil.copytree(adapter_folder, tmp_path / "adapter"))
    tensors = dict(safetensors_file.read(other / "adapter_model.safetensors"))
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    del tensors[name]
    safetensors_file.write(other / "adapter_model.safetensors", tensors, np.float32)
    assert main(["merge", "--model", model, "--adapter", str(other), "--out", str(tmp_path / "merged")]) == 1
    assert f"{name} is missing" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("number", [np.nan, 3e38])
def test_an_adapter_whose_sum_is_not_finite_leaves_nothing(model, adapter_folder, tmp_path, capsys, number):
    other = Path(shutil.copytree(adapter_folder, tmp_path / "adapter"))
    tensors = dict(safetensors_file.read(other / "adapter_model.safetensors"))
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    tensors[name] = np.full_like(tensors[name], number)
    safetensors_file.write(other / "adapter_model.safetensors", tensors, np.float32)
    assert main(["merge", "--model", model, "--adapter", str(other), "--out", str(tmp_path / "merged")]) == 1
    error = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight: not all of its values would be finite numbers in float32" in error
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("size", [0, 100, 50_000])
def test_a_full_disk_leaves_nothing(model, adapter_folder, tmp_path, capsys, monkeypatch, full_disk, size):
    derive = folder.derive

    def derive_on_a_full_disk(*args):
        with full_disk(size):
            derive(*args)

    monkeypatch.setattr(folder, "derive", derive_on_a_full_disk)
    flags = ["merge", "--model", model, "--adapter", adapter_folder, "--out", str(tmp_path / "merged")]
    assert main(flags) == 1
    assert re.search(r"/merged/\S+: cannot be written \(File too large\)", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert main(flags) == 0


def test_another_base_is_told(model, adapter_folder, tmp_path, capsys):
    other = shutil.copytree(adapter_folder, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "someone/else"}))
    assert main(["generate", "--model", model, "--adapter", str(other), "--prompt", "the cat"]) == 0
    assert "trained on someone/else" in capsys.readouterr().err
    assert main(["merge", "--model", model, "--adapter", str(other), "--out", str(tmp_path / "merged")]) == 0
    assert "trained on someone/else" in capsys.readouterr().out
