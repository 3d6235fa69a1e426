"""Sizes on the command line."""

import argparse

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
