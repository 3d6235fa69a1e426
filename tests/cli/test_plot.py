"""mesp-np plot: a run's log as pictures."""

import builtins
import json
from xml.etree import ElementTree

import pytest

from mesp_np.cli import main
from mesp_np.plot import read
from tests.training import log, train


@pytest.fixture
def run_dir(model, data, tmp_path):
    assert train(model, data, tmp_path / "run", "--iters", "4", "--eval-every", "2") == 0
    return tmp_path / "run"


def test_both_pictures(run_dir, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plot", str(run_dir)]) == 0
    assert f"{run_dir / 'plot.svg'}" in capsys.readouterr().out
    text = (run_dir / "plot.svg").read_text()
    ElementTree.fromstring(text)
    assert all(words in text for words in ("loss per token", "held out", "live peak", "process grew by", "MiB"))
    assert (run_dir / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_elsewhere_and_again_with_the_same_bytes(run_dir, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        assert main(["plot", str(run_dir), "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert not (run_dir / "plot.svg").exists()


def test_every_whole_line_is_read(run_dir):
    records = log(run_dir)
    with open(run_dir / "log.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    assert read(run_dir) == records and len(records) == 4


@pytest.mark.parametrize("text, words", [
    (None, "cannot be read"), ("", "has no step yet"), ("{\n", "line 1 is no step"), ("[]\n", "line 1 is no step"),
    ('{"step": 1}\n', "line 1 is no step")])
def test_what_is_no_run_is_one_clear_line(tmp_path, capsys, text, words):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    assert main(["plot", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/log.jsonl: " in error and words in error and len(error.splitlines()) == 1
    assert not (tmp_path / "plot.svg").exists()


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    numbers = dict.fromkeys(("step", "loss", "live_peak_bytes", "extent_bytes", "os_growth_bytes"), 1)
    (tmp_path / "log.jsonl").write_text(json.dumps(numbers) + "\n")
    plain = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["plot", str(tmp_path)]) == 1
    assert "Matplotlib is not installed, which draws the pictures; pip install 'mesp-np" in capsys.readouterr().err
