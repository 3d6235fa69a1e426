"""Ctrl-C in a training run: the first ends what is going on and saves, the second insists."""

import json
import signal
import subprocess
import sys
import time

import pytest

from mesp_np.data.batches import Units
from mesp_np.engine import Engine
from mesp_np.generate import Generator
from tests.training import FAST, log, train


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises KeyboardInterrupt, and still does so after the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.fixture
def interrupt_at(monkeypatch, ctrl_c):
    """Send Ctrl-C within the count-th call of a method, planning not counted; returns the list of all such calls."""
    def prepare(owner, name, count):
        plain, calls = getattr(owner, name), []

        def watched(self, *args, **settings):
            if self.arena.capacity is not None:
                calls.append(args)
                if len(calls) == count:
                    signal.raise_signal(signal.SIGINT)
            return plain(self, *args, **settings)

        monkeypatch.setattr(owner, name, watched)
        return calls

    return prepare


MANY_BATCHES = "--batch-size", "1", "--iters", "6"


@pytest.fixture
def both_files(data, tmp_path):
    """24 rows to train on and the same to validate on."""
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(open(data).read())
    return str(tmp_path)


def test_ctrl_c_ends_a_validation_after_its_batch_and_saves(model, both_files, tmp_path, capsys, interrupt_at):
    """24 batches before; then within the 3rd after step 2: no 4th, no last validation, no last sample."""
    calls = interrupt_at(Engine, "evaluate", 24 + 3)
    assert train(model, both_files, tmp_path / "run", *MANY_BATCHES, "--eval-every", "2") == 130
    assert len(calls) == 24 + 3 + 1                                  # the last looks at what is saved
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True and summary["steps"] == 2 and summary["sample_before"]
    assert summary["valid_loss_before"] and summary["valid_loss_after"] is summary["sample_after"] is None
    assert len(log(tmp_path / "run")) == 2 and not any("valid_loss" in line for line in log(tmp_path / "run"))
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert "interrupted; what was trained so far is" in capsys.readouterr().out


def test_ctrl_c_in_the_last_validation_or_sample_keeps_the_adapter(model, both_files, tmp_path, interrupt_at):
    calls = interrupt_at(Engine, "evaluate", 24 + 1 + 3)
    assert train(model, both_files, tmp_path / "a", *MANY_BATCHES) == 130 and len(calls) == 24 + 1 + 3
    tokens = interrupt_at(Generator, "logits", 5 + 2)
    assert train(model, both_files, tmp_path / "b", *MANY_BATCHES) == 130 and len(tokens) == 5 + 2
    for run in ("a", "b"):
        assert (tmp_path / run / "adapter" / "adapter_model.safetensors").exists()
        summary = json.loads((tmp_path / run / "summary.json").read_text())
        assert summary["interrupted"] is True and summary["sample_before"] and summary["sample_after"] is None


def test_ctrl_c_before_the_first_step_leaves_nothing(model, both_files, tmp_path, capsys, interrupt_at):
    calls = interrupt_at(Engine, "evaluate", 3)
    assert train(model, both_files, tmp_path / "run", *MANY_BATCHES) == 130
    assert len(calls) == 3 and "interrupted" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_two_interrupts_before_the_first_step(model, data, tmp_path, monkeypatch, capsys, ctrl_c):
    def interrupted(*_):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Engine, "evaluate", interrupted)
    assert train(model, data, tmp_path / "run", "--iters", "4") == 130
    assert "interrupted" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_first_interrupt_finishes_the_step_and_saves(model, data, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-m", "mesp_np", "train", "--model", model, "--data", data, "--run-dir",
                                str(run), *FAST, "--iters", "100000", "--eval-every", "0"],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (run / "log.jsonl").exists() or not log(run):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in out and "Traceback" not in out
    assert (run / "adapter" / "adapter_model.safetensors").exists()
    assert json.loads((run / "summary.json").read_text())["steps"] == len(log(run))


def test_a_run_of_a_billion_steps_starts_at_once(model, data, tmp_path, interrupt_at, monkeypatch):
    """The shapes of batches are looked for in one epoch, not in all of them."""
    shapes = []
    shape = Units.shape
    monkeypatch.setattr(Units, "shape", lambda *args: shapes.append(shape(*args)) or shapes[-1])
    interrupt_at(Engine, "step", 3)
    assert train(model, data, tmp_path / "run", "--iters", "1000000000", "--eval-every", "0") == 130
    assert len(shapes) < 50 and len(log(tmp_path / "run")) == 3
