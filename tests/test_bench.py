"""tools/bench.py: what systems are given, when they get a row, and what becomes of those that fail; never a time."""

import importlib
import sys
from argparse import Namespace
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from mesp_np import PRESETS, RunConfig, plan_step
from mesp_np.checkpoint import folder
from mesp_np.checkpoint.safetensors_file import read
from mesp_np.ops.quant import widen

TOOLS = Path(__file__).parents[1] / "tools"

STUB = """
import os
import signal
import sys
import numpy as np
from benchmarks.worker import serve

class Stub:
    def __init__(self, spec):
        print("libraries print what they like")
        self.about = {variant: {"kind": "exact", "timed": True} for variant in spec["variants"]}
        self.scale = spec["scale"]

    def gradients(self, variant, path):
        np.savez(path, **{"layers.0.A": self.scale * np.arange(6.0).reshape(2, 3)})
        return 2.5

    def memory(self, variant):
        assert self.scale == 1, "measured, although it computes something else"
        return {"live": 10, "taken": None}

    def step(self, variant):
        raise ArithmeticError("one too many")

    def rate(self):
        return 7.0

    def leave(self):
        print("out of luck", file=sys.stderr)
        sys.exit(3)

    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)

serve(Stub)
"""


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """A function from the name of a module of the benchmark to it; processes find the module `stub`."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.syspath_prepend(TOOLS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return importlib.import_module


def gradients(seed=0, **changes):
    rng = np.random.default_rng(seed)
    return {"A": rng.standard_normal((40, 50)), "B": rng.standard_normal((50, 60))} | changes


@pytest.mark.parametrize("kind", ["exact", "rounded"])
def test_a_gradient_that_is_wrong_anywhere_is_seen(bench, kind):
    agreement, right = bench("benchmarks.agreement"), gradients()

    def apart(**changes):
        return agreement.difference(kind, (1.0, right | changes), (1.0, right)) / agreement.LIMITS[kind]

    assert apart() < 1e-6
    assert apart(B=right["B"] * (1 + 1e-5)) < 1
    assert apart(A=right["A"] * 0) > 1
    assert apart(A=right["A"][::-1]) > 1
    with pytest.raises(ValueError, match="1 are among the 2 expected"):
        apart(A=right["A"].T)


@pytest.mark.parametrize("kind, factor", [("exact", 1.01), ("rounded", 1.2)])
def test_gradients_of_another_size_are_not_equal(bench, kind, factor):
    agreement, right = bench("benchmarks.agreement"), gradients()
    larger = {name: factor * array for name, array in right.items()}
    apart = agreement.difference(kind, (1.0, larger), (1.0, right))
    assert apart == pytest.approx(factor - 1) and apart > agreement.LIMITS[kind]


@pytest.mark.parametrize("flags, words", [
    (["--rounds", "0"], "'0' is not 1 or more"), (["--lengths", "128,x"], "'x' is not 1 or more"),
    (["--methods", "mezo,mesp"], "begin with an exact method"), (["--methods", ""], "begin with an exact method"),
    (["--methods", "forward"], "begin with an exact method"), (["--out", "/no/where.json"], "/no/where.json: cannot")])
def test_bad_flags_are_told_before_any_work(bench, flags, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", *flags])
    with pytest.raises(SystemExit) as refused:
        bench("bench").arguments()
    assert refused.value.code == 2 and words in capsys.readouterr().err


def test_an_estimate_is_right_when_its_slope_is_that_along_its_own_noise(bench):
    agreement, right, z = bench("benchmarks.agreement"), gradients(), gradients(seed=1)
    slope = sum(float((z[name] * right[name]).sum()) for name in z)

    def apart(slope, z):
        return agreement.difference("estimate", (1.0, {name: slope * array for name, array in z.items()}), (1.0, right))

    assert apart(slope, z) < 0.1
    assert apart(2 * slope, z) > 0.1 and apart(0, z) > 0.1
    assert np.median([apart(slope, gradients(seed)) for seed in range(2, 9)]) > 0.2        # one may be right by chance


def test_what_a_process_prints_and_raises(bench, tmp_path):
    """Prints go to the log, an error is told and the process goes on, the last words of one that ended are why."""
    worker = bench("benchmarks.worker")
    (tmp_path / "spec").write_text('{"variants": ["one"], "scale": 1}')
    with closing(worker.Worker(sys.executable, "stub", tmp_path / "spec", tmp_path / "log")) as made:
        assert made.about == {"one": {"kind": "exact", "timed": True}}
        with pytest.raises(worker.Failed, match="ArithmeticError: one too many"):
            made.ask("step", "one")
        assert made.ask("memory", "one") == {"live": 10, "taken": None}
        with pytest.raises(worker.Failed, match="out of luck"):
            made.ask("leave")
        with pytest.raises(worker.Failed, match="out of luck"):
            made.ask("step", "one")
    with closing(worker.Worker(sys.executable, "stub", tmp_path / "spec", tmp_path / "other-log")) as made:
        with pytest.raises(worker.Failed, match="ended by signal 9"):
            made.ask("end")
    assert "libraries print what they like" in (tmp_path / "log").read_text()
    with pytest.raises(worker.Failed, match="No module named"):
        worker.Worker(sys.executable, "benchmarks.nowhere", tmp_path / "spec", tmp_path / "log")


def test_no_row_without_agreement(bench, tmp_path):
    """What computes something else is not even asked for its memory, and is in the table below, with the reason."""
    measure, report = bench("benchmarks.measure"), bench("benchmarks.report")
    systems = [measure.System(name, "stub", sys.executable, ("one",), {"scale": scale})
               for name, scale in (("right", 1), ("also right", 1), ("wrong", 1.01))]
    systems.insert(1, measure.System("missing", "benchmarks.nowhere", sys.executable, ("one",)))
    with ExitStack() as stack:
        rows, places, not_run = measure.examine_all(systems, {}, tmp_path, stack)
    assert list(rows) == list(places) == ["right, one", "also right, one"]
    assert list(not_run) == ["missing", "wrong, one"] and "computes something else" in not_run["wrong, one"]
    rows["right, one"]["seconds"], rows["also right, one"]["seconds"] = [2.0, 1.0, 6.0], [4.0]
    text = report.markdown(report.complete({
        "command": "", "commit": "", "machine": {"cpu": "", "cores": 2, "ram_bytes": 1, "blas": []}, "versions": {},
        "setting": {"model": "", "length": 4, "rounds": 3, "run": {"rank": 1, "targets": [], "threads": 1}},
        "rows": rows, "not_run": not_run, "flops_per_second": [1e9], "baseline": "right, one"}))
    assert "| right, one | 0.0e+00 | 2.000 | 1.000 to 6.000 | 1.00 | - | 0.0 | - |" in text
    assert "| also right, one | 0.0e+00 | 4.000 (once) | 4.000 to 4.000 | 2.00 | - | 0.0 | - |" in text
    assert "\nnot run: wrong, one: computes something else" in text and "| wrong" not in text


def test_what_fails_when_it_is_timed_loses_its_row_and_nothing_else(bench, tmp_path):
    measure = bench("benchmarks.measure")
    with ExitStack() as stack:
        stub = measure.System("stub", "stub", sys.executable, ("slow", "failing"), {"scale": 1, "rate": 7.0})
        rows, places, not_run = measure.examine_all([stub], {}, tmp_path, stack)
        rows["stub, slow"]["first_seconds"] = 100.0
        rates = measure.time_rounds(rows, places, not_run, measure.start(stub, {}, tmp_path, stack), 2, patience=60)
    assert rates == [7.0, 7.0] and {name: row["seconds"] for name, row in rows.items()} == {"stub, slow": [100.0]}
    assert not_run == {"stub, failing": "ArithmeticError: one too many"}


def test_nothing_is_measured_without_a_reference(bench, tmp_path):
    measure = bench("benchmarks.measure")
    missing = measure.System("missing", "benchmarks.nowhere", sys.executable, ("one",))
    with ExitStack() as stack, pytest.raises(measure.Failed, match="no reference"):
        measure.examine_all([missing, measure.System("right", "stub", sys.executable, ("one",), {"scale": 1})], {},
                            tmp_path, stack)


def dense(path):
    """Checkpoint name -> float32 matrix of a folder."""
    made = {}
    for name, stored in folder.load(path).weights.items():
        stored = stored if stored.ndim == 2 else stored[np.newaxis]
        made[name] = np.empty(stored.shape, np.float32)
        widen(made[name], stored)
    return made


def test_all_forms_of_a_random_model_hold_the_same_numbers(bench, tmp_path, monkeypatch):
    inputs = bench("benchmarks.inputs")
    _, forms = inputs.forms("tiny", inputs.FORMS, 0, tmp_path / "a")
    numbers = {form: dense(path) for form, path in forms.items()}
    assert set(numbers) == {"f32", "bf16", "4bit"}
    for form in "f32", "4bit":
        assert all(np.array_equal(array, numbers["bf16"][name]) for name, array in numbers[form].items())
    monkeypatch.setattr(inputs, "Exact", bench("random_model").Random)
    _, forms = inputs.forms("tiny", ("bf16", "4bit"), 0, tmp_path / "b")
    one, other = (dense(forms[form])["model.embed_tokens.weight"] for form in ("bf16", "4bit"))
    assert not np.array_equal(one, other)


def test_a_folder_has_its_own_form_and_float32(bench, tmp_path):
    inputs = bench("benchmarks.inputs")
    _, forms = inputs.forms("tiny", ("4bit",), 0, tmp_path / "a")
    _, given = inputs.forms(forms["4bit"], inputs.FORMS, 0, tmp_path / "b")
    assert set(given) == {"4bit", "f32"} and given["4bit"] == forms["4bit"]
    assert all(np.array_equal(array, dense(given["f32"])[name]) for name, array in dense(forms["4bit"]).items())


def test_no_adapter_is_zero_and_all_are_numbers_of_bfloat16(bench, tmp_path):
    bench("benchmarks.inputs").write_adapter(tmp_path / "adapter", PRESETS["tiny"], RunConfig())
    stored = read(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == 2 * 7 * PRESETS["tiny"].num_hidden_layers
    for array in stored.values():
        assert np.all(array.view(np.uint32) & 0xFFFF == 0) and np.abs(array).min(axis=1).max() > 0


def arguments(**changes):
    return Namespace(**dict(preset="tiny", model=None, systems=(), methods=("mesp-lean", "mebp", "mezo", "forward"),
                            forms=("bf16", "4bit"), computes=("full",), rounds=1, patience=60, scale=False,
                            lengths=[8, 16], venv=None, seq=16, threads=1) | changes)


def test_our_rows_agree_and_their_bytes_are_the_plans(bench, tmp_path):
    with ExitStack() as stack:
        result = bench("bench").measured(arguments(), tmp_path, stack)
    rows = result["rows"]
    assert not result["not_run"] and len(rows) == 8
    assert rows["mesp_np 4bit, mesp-lean"]["difference"] == rows["mesp_np bf16, mebp"]["difference"] == 0
    for name, method in (("mesp_np bf16, mesp-lean", "mesp-lean"), ("mesp_np bf16, mezo", "mezo")):
        run = RunConfig(method=method, batch_size=1, seq=16, optimizer="sgd")
        plan = plan_step(PRESETS["tiny"], run)
        assert (rows[name]["live"], rows[name]["extent"]) == (plan.live_peak_bytes, plan.extent_bytes)
        assert rows[name]["flops"] == sum(plan.flops.values())
    assert set(result["against_two_forwards"]) == {"mesp_np bf16, mezo", "mesp_np 4bit, mezo"}


def test_the_lengths_of_a_scale(bench, tmp_path):
    with ExitStack() as stack:
        result = bench("bench").measured(arguments(scale=True, forms=("4bit",)), tmp_path, stack)
    live = [row["live"] for row in result["rows"].values()]
    assert list(result["rows"]) == ["T=8", "T=16"] and live[0] < live[1]


@pytest.mark.oracle
def test_pytorch_computes_the_same(bench, tmp_path, monkeypatch):
    """In every variant, in float32 and bfloat16; and checkpointing and chunks of the loss show in its bytes."""
    pytest.importorskip("peft")
    monkeypatch.setattr(bench("benchmarks.environment"), "make", lambda folder, groups: (sys.executable, {}))
    with ExitStack() as stack:
        result = bench("bench").measured(
            arguments(systems=("pytorch", "pytorch-bf16"), methods=("mesp-lean",), forms=("bf16",), seq=256), tmp_path,
            stack)
    assert not result["not_run"]
    for kind in "float32", "bf16":
        chunked, whole, plain = (result["rows"][f"PyTorch {kind}, {name}"]["live"] for name in
                                 ("checkpointing, chunked loss", "checkpointing", "plain"))
        assert chunked < whole < plain or kind == "bf16" and chunked <= whole < plain     # there a block is the peak
