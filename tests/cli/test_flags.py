"""Sizes and layers on the command line."""

import argparse
import json

import pytest

from mesp_np.cli import flags, main


@pytest.mark.parametrize("text, count", [
    ("96MiB", 96 << 20), ("1.5GB", 1_500_000_000), ("1024", 1024), ("10 KiB", 10240), ("2g", 2_000_000_000),
    ("0.5TiB", 1 << 39), ("7B", 7), ("64kb", 64_000), (" 1Mi ", 1 << 20)])
def test_size(text, count):
    assert flags.size(text) == count


@pytest.mark.parametrize("text", ["abc", "", "MiB", "-5", "1.2.3GB", ".", "5XB", "1e9", "nan", "96 Mi B"])
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
    ("--layers x", "'x' is neither a number nor a range"), ("--num-layers 0", "'0' is no number of layers"),
    ("--layers 5", "--layers names 5; the model has layers 0 to 4"), ("--layers 1 --num-layers 1", "not allowed with")])
def test_layers_that_make_no_sense(given, words, capsys):
    try:
        code = main(["plan", "--model", "tiny", *given.split()])
    except SystemExit as exit:
        code = exit.code
    assert code == 2 and words in capsys.readouterr().err
