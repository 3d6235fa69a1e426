"""--adapter: its settings become the run's, of either dialect; a flag that differs is refused, but for dropout."""

import argparse
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from mesp_np.checkpoint import adapter, folder, safetensors_file
from mesp_np.checkpoint.adapter_config import read_config
from mesp_np.cli import flags, main
from mesp_np.config import RunConfig
from mesp_np.errors import UsageError
from tests import small, tiny_tokenizer


def run_config(*argv, **defaults):
    parser = argparse.ArgumentParser()
    flags.add_config_flags(parser, RunConfig, flags.RUN_HELP)
    parser.add_argument("--adapter")
    return flags.run_config(parser.parse_args(argv), **defaults)


@pytest.fixture(scope="module")
def peft(tmp_path_factory, model):
    path = tmp_path_factory.mktemp("adapters") / "adapter"
    settings = dict(rank=4, alpha=6.0, dropout=0.25, targets=("q_proj", "up_proj"), layers=(-1,))
    with small.engine(folder.load(model).config, **settings) as engine:
        adapter.save(path, engine.parameters, engine.run, model)
    return str(path)


@pytest.fixture(scope="module")
def mlx(tmp_path_factory, peft):
    """The same adapter as mlx-lm would keep it."""
    path = tmp_path_factory.mktemp("adapters")
    stored = safetensors_file.read(f"{peft}/adapter_model.safetensors")
    names = {name: name.removeprefix("base_model.model.").removesuffix(".weight") for name in stored}
    safetensors_file.write(path / "adapters.safetensors", {names[name].replace("lora_A", "lora_a").replace(
        "lora_B", "lora_b"): array.T for name, array in stored.items()}, np.float32)
    (path / "adapter_config.json").write_text(json.dumps({
        "fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {
            "rank": 4, "scale": 1.5, "dropout": 0.25, "keys": ["self_attn.q_proj", "mlp.up_proj"]}}))
    return str(path)


def test_its_settings_are_the_runs(peft, mlx):
    for path in (peft, mlx):
        run = run_config("--adapter", path)
        assert (run.rank, run.alpha, run.dropout, run.targets) == (4, 6.0, 0.25, ("q_proj", "up_proj"))
        assert run.adapted_layers(2) == {1}


def test_a_given_dropout_wins(peft):
    assert run_config("--adapter", peft, "--dropout", "0").dropout == 0.0
    assert run_config("--adapter", peft, "--dropout", "0.5").dropout == 0.5
    assert run_config("--adapter", peft, dropout=0.0).dropout == 0.0                # a command's own
    assert run_config("--dropout", "0.5").dropout == 0.5


def test_other_flags_may_repeat_what_it_says_and_nothing_else(peft):
    same = ["--rank", "4", "--alpha", "6", "--targets", "up_proj,q_proj", "--layers", "1"]
    assert run_config("--adapter", peft, *same) == run_config("--adapter", peft)
    for flag, value in (("--rank", "8"), ("--alpha", "4"), ("--targets", "q_proj")):
        with pytest.raises(UsageError, match=f"{flag} differs"):
            run_config("--adapter", peft, flag, value)


@pytest.mark.parametrize("given, code", [
    ("--layers 1", 0), ("--num-layers 1", 0), ("--layers 0", 2), ("--num-layers 2", 2), ("--num-layers -1", 2)])
def test_layers_may_be_told_in_any_way_that_means_its_own(model, peft, given, code, capsys):
    assert main(["plan", "--model", model, "--adapter", peft, *given.split()]) == code
    assert code == 0 or "the layers given differ from those of" in capsys.readouterr().err


def test_training_goes_on_from_either_dialect(model, data, peft, mlx, tmp_path):
    """Nothing is trained at a rate of almost 0, so what comes out is what went in, in PEFT's format."""
    for path in (peft, mlx):
        out = tmp_path / path.replace("/", "-")
        assert main(["train", "--model", model, "--data", data, "--adapter", path, "--run-dir", str(out),
                     "--iters", "1", "--lr", "1e-30", "--weight-decay", "0", "--seq", "24", "--batch-size", "2",
                     "--sample-tokens", "0", "--json"]) == 0
        given, made = (safetensors_file.read(f"{place}/adapter_model.safetensors") for place in (peft, out / "adapter"))
        assert set(given) == set(made) and all(np.array_equal(given[name], made[name]) for name in given)
        config = read_config(out / "adapter")
        assert config.layers == (1,) and config.dropout == 0.25


def test_both_dialects_answer_alike(model, peft, mlx, capsys):
    answers = []
    for path in (peft, mlx):
        assert main(["generate", "--model", model, "--adapter", path, "--prompt", "the cat", "--max-tokens", "8"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("command", [["plan"], ["generate", "--prompt", "x"]], ids=" ".join)
def test_an_adapter_of_another_model(peft, command, tmp_path, capsys):
    """A plan tells it as everything else does: the adapter by name, and what does not fit."""
    config = small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, intermediate_size=96)
    folder.save(tmp_path / "model", config, small.weights(config), tiny_tokenizer.write(tmp_path / "tokenizer"))
    assert main([*command, "--model", str(tmp_path / "model"), "--adapter", peft]) == 1
    words = r".*1\.mlp\.up_proj\.lora_B\.weight has shape \(\d+, 4\), expected \(96, 4\); the adapter does not fit"
    assert re.search(peft + ": " + words, capsys.readouterr().err)


def test_layers_the_model_does_not_have(model, peft, tmp_path, capsys):
    config = Path(shutil.copytree(peft, tmp_path / "adapter")) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layers_to_transform": [1, 5]}))
    assert main(["generate", "--model", model, "--adapter", str(config.parent), "--prompt", "the cat"]) == 1
    assert "adapts layer 5, the model has layers 0 to 1" in capsys.readouterr().err
