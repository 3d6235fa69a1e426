"""Sizes and layers on the command line."""

import argparse
import json

import pytest

from mesp_np.cli import flags, main
from tests import small


@pytest.mark.parametrize("text, count", [
    ("96MiB", 96 << 20), ("1.5GB", 1_500_000_000), ("1024", 1024), ("10 KiB", 10240), ("2g", 2_000_000_000),
    ("0.5TiB", 1 << 39), ("7B", 7), ("64kb", 64_000), (" 1Mi ", 1 << 20)])
def test_size(text, count):
    assert flags.size(text) == count


@pytest.mark.parametrize("text", ["abc", "", "MiB", "-5", "1.2.3GB", ".", "5XB", "1e9", "nan", "96 Mi B", "0",
                                  "0.4", "96iB", "0KiB"])
def test_no_size(text, capsys):
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        flags.size(text)
    with pytest.raises(SystemExit) as exit:
        main(["train", f"--memory-budget={text}"])
    assert exit.value.code == 2 and "is no size; write 96MiB" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("given, layers", [
    ("--layers 1", {1}), ("--layers 0,2-3", {0, 2, 3}), ("--num-layers 1", {4}), ("--num-layers 2", {3, 4}),
    ("--num-layers -1", {0, 1, 2, 3, 4}), ("", {0, 1, 2, 3, 4})])
def test_layers_that_get_adapters(given, layers, capsys):
    assert main(["plan", "--model", "tiny", "--json", *given.split()]) == 0
    parameters = json.loads(capsys.readouterr().out)["trainable_parameters"]
    assert parameters == len(layers) * 8 * (2 * 128 * 2 + 2 * (128 + 32) + 3 * (128 + 352))


@pytest.mark.parametrize("given, words", [
    ("--layers x", "'x' is neither a number nor a range"), ("--layers 5-3", "'5-3' is neither a number nor a range"),
    ("--layers ,", "names no layers"), ("--layers=", "names no layers"), ("--layers 0-9999999", "is neither a number"),
    ("--num-layers 9999999", "is no number of layers"), ("--num-layers 0", "'0' is no number of layers"),
    ("--layers 5", "--layers names 5; the model has layers 0 to 4"), ("--layers 1 --num-layers 1", "not allowed with")])
def test_layers_that_make_no_sense(given, words, capsys):
    try:
        code = main(["plan", "--model", "tiny", *given.split()])
    except SystemExit as exit:
        code = exit.code
    assert code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("given", [
    f"{flag} {value}" for flag, values in {"--rank": ("0", "1" + "0" * 30), "--seq": ("1" + "0" * 30,),
                                           "--batch-size": ("-1",), "--alpha": ("0", "1e300", "nan"),
                                           "--weight-decay": ("-1", "1e300"), "--dropout": ("1", "nan")}.items()
    for value in values])
def test_numbers_that_no_run_can_have(given, capsys):
    assert main(["plan", "--model", "tiny", *given.split()]) == 2
    assert f"{given.split()[0]} is " in capsys.readouterr().err


def test_a_folder_goes_before_a_preset_of_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def trained():
        assert main(["plan", "--model", "tiny", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["trainable_parameters"]

    preset = trained()
    (tmp_path / "tiny").write_text("a file is no folder")
    assert trained() == preset
    (tmp_path / "tiny").unlink()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(small.model_config().to_json()))
    assert trained() != preset
    assert main(["generate", "--model", "tiny", "--prompt", "x"]) == 1
    assert "tiny: has no model.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_the_head_and_the_embedding_get_no_adapter(tied, module, tmp_path, capsys):
    """Tied, they are one matrix, and an adapter would be merged into both or thrown away; neither is trained so."""
    (tmp_path / "config.json").write_text(json.dumps(small.model_config(tie_word_embeddings=tied).to_json()))
    plan = ["plan", "--model", str(tmp_path), "--targets"]
    assert main([*plan, f"q_proj,{module}"]) == 2
    assert f"--targets names {module}; choose from q_proj" in capsys.readouterr().err
    assert main([*plan, "q_proj"]) == 0
