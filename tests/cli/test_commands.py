"""plan, compare, gradcheck, show and generate: their JSON, their words, their exit codes."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from mesp_np import PRESETS, Batch, Engine, RunConfig, gradcheck, model_checks
from mesp_np.cli import main
from mesp_np.cli import show as show_command
from mesp_np.methods import METHODS
from mesp_np.ops import lora
from mesp_np.params import phantom_weights
from mesp_np.process import memory

STAGES = {"forward", "loss", "backward", "update"}


def as_json(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_json(capsys):
    plan = as_json(capsys, "plan", "--model", "qwen2.5-0.5b", "--batch-size", "1", "--optimizer", "sgd")
    assert plan["trainable_parameters"] == 4_399_104
    assert plan["model"] == "qwen2.5-0.5b" and plan["method"] == "mesp-lean" and plan["rank"] == 8
    assert plan["batch"] == 1 and plan["seq"] == 256
    assert set(plan["stage_peak_bytes"]) == STAGES
    assert {"forward", "recompute", "backward"} <= set(plan["flops"])
    assert sum(plan["category_bytes_at_peak"].values()) == plan["live_peak_bytes"] <= plan["extent_bytes"]
    assert sum(tensor["bytes"] for tensor in plan["at_peak"]) == plan["live_peak_bytes"]
    assert all(set(tensor) == {"name", "bytes", "category"} for tensor in plan["at_peak"])
    assert plan["events"] > 1000 and plan["frozen_weight_bytes"] == 2 * 494_032_768


@pytest.mark.parametrize("preset, count", [("qwen2.5-1.5b", 9_232_384), ("qwen2.5-3b", 14_966_784),
                                           ("qwen2.5-7b", 20_185_088)])
def test_plan_of_presets(capsys, preset, count):
    assert as_json(capsys, "plan", "--model", preset, "--batch-size", "1")["trainable_parameters"] == count


def test_plan_of_a_folder_without_weights(model, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes(open(f"{model}/config.json", "rb").read())
    bare, whole = (as_json(capsys, "plan", "--model", path) for path in (str(tmp_path), model))
    assert bare["live_peak_bytes"] == whole["live_peak_bytes"]


def test_plan_for_a_person(capsys):
    assert main(["plan", "--model", "tiny"]) == 0
    out = capsys.readouterr().out
    assert "live peak" in out and "checkpoint" in out and "MiB" in out


def test_compare_json(model, capsys):
    result = as_json(capsys, "compare", "--model", model, "--batch-size", "2", "--seq", "24", "--rounds", "1")
    assert result["run"]["seq"] == 24 and set(result["methods"]) == set(METHODS)
    for name, row in result["methods"].items():
        assert row["live_peak_bytes"] == row["planned_live_peak_bytes"]
        assert set(row["stage_peak_bytes"]) == STAGES and row["seconds_per_step"] > 0
        assert {"extent_bytes", "recomputed_flops", "os_growth_bytes", "gradient_relative_error"} <= set(row)
        assert row["resident_bytes"] > (row["weight_resident_bytes"] or 0)
        assert (row["gradient_bits_different"] == 0 and abs(row["gradient_cosine"] - 1) < 1e-12) == (name != "mezo")
    peaks = [result["methods"][name]["live_peak_bytes"] for name in METHODS]
    assert peaks == sorted(peaks, reverse=True)


def test_compare_for_a_person(model, data, capsys):
    assert main(["compare", "--model", model, "--data", data, "--methods", "mebp,mesp,mezo", "--seq", "24",
                 "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "equal" in out and "DIFFERS" not in out and "the theory's mean" in out and "silu" in out
    assert "bfloat16" not in out


def test_compare_says_what_rounding_costs(model, capsys):
    assert main(["compare", "--model", model, "--methods", "mesp", "--seq", "24", "--rounds", "1",
                 "--compute", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "products of bfloat16 by " in out and "against mesp with --compute full" in out and "0.0e+00" not in out


def test_compare_cuts_no_figure_when_it_is_piped(model, monkeypatch, capsys):
    """Side by side, the categories of six methods need more than 60 columns."""
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["compare", "--model", model, "--batch-size", "1", "--seq", "8", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out and out.count("bytes at the peak") > 1
    assert {name for line in out.splitlines() if "bytes at the peak" in line for name in line.split()} >= set(METHODS)


@pytest.mark.parametrize("names", ["foo", "foo,mesp", "mezo,foo"])
def test_compare_of_an_unknown_method(names, model, capsys):
    assert main(["compare", "--model", model, "--methods", names]) == 2
    assert f"'foo'; choose from {', '.join(METHODS)}" in capsys.readouterr().err


def test_gradcheck_json_and_exit_code(capsys, monkeypatch):
    result = as_json(capsys, "gradcheck", "op", "lora")
    assert result["checks"] and all(set(check) == {"max_relative_error", "tolerance", "passed"}
                                    for check in result["checks"].values())
    plain = lora.backward_added
    monkeypatch.setattr(lora, "backward_added", lambda dh, A: plain(dh, -A))
    assert main(["gradcheck", "op", "lora"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_block_and_model_pass():
    checks = model_checks.check_block() + model_checks.check_model()
    assert [check for check in checks if not check.passed] == []
    assert {check.name.split(".")[1] for check in checks} >= {"store", "mebp", "mesp-store-h", "mesp", "mesp-lean"}


def test_gradcheck_usage(capsys):
    assert main(["gradcheck", "op", "nonsense"]) == 2
    assert main(["gradcheck", "block", "lora"]) == 2


@pytest.mark.parametrize("name", [*show_command.OPS, *show_command.KERNELS, *show_command.PARTS, *show_command.METHODS,
                                  "mesp-lean"])
def test_show(name, capsys):
    assert main(["show", name]) == 0
    assert len(capsys.readouterr().out) > 300


def test_show_lists_every_op(capsys):
    from pathlib import Path
    files = {path.stem for path in Path(lora.__file__).parent.glob("*.py")} - {"__init__"}
    assert {*show_command.OPS, *show_command.KERNELS} == files
    assert main(["show"]) == 0 and main(["show", "nonsense"]) == 2


@pytest.mark.parametrize("name", show_command.OPS)
def test_every_op_derivation_has_its_parts(name):
    """All of them, each at the start of a line and in this order; three are no functions to differentiate."""
    parts = ["Shapes", "Forward", "Backward", "Saved", "Recomputed", "Cost", "Source"]
    absent = {"quant": parts[1:6], "optim_steps": ["Forward", "Backward", "Recomputed"], "noise": ["Recomputed"]}
    found = re.findall(rf"^({'|'.join(parts)})(?= )", show_command.find(name).__doc__, re.MULTILINE)
    assert found == [part for part in parts if part not in absent.get(name, [])]


def test_generate_is_greedy_and_repeatable(model, capsys):
    assert main(["generate", "--model", model, "--prompt", "the cat", "--max-tokens", "8"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the cat")
    main(["generate", "--model", model, "--prompt", "the cat", "--max-tokens", "8", "--threads", "1"])
    assert capsys.readouterr().out == first


def test_generate_usage(model, capsys):
    assert main(["generate", "--model", model, "--prompt", "", "--max-tokens", "8"]) == 1
    assert main(["generate", "--model", model, "--prompt", "x", "--top-p", "0"]) == 2
    assert main(["generate", "--model", model, "--prompt", "x" * 64]) == 1
    assert "shorten" in capsys.readouterr().err


def test_module_runs():
    done = subprocess.run([sys.executable, "-m", "mesp_np", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("mesp-np ")


def test_planning_touches_no_weights():
    """GIVEN 7B, 15 GB in bf16 WHEN a step by `store` is planned THEN the process hardly grows.

    The engine of the plan is still there when the process is measured, with all it holds.
    """
    config, run = PRESETS["qwen2.5-7b"], RunConfig(method="store", batch_size=1, seq=4096)
    before = memory().anonymous
    with Engine(config, phantom_weights(config), run) as engine:
        engine.step([Batch.phantom((1, 4096))], rate=1.0)
        assert memory().anonymous - before < 200e6
        assert engine.arena.ledger.live_peak > 8 << 30


def test_checks_are_json_even_when_not_finite(monkeypatch, capsys):
    monkeypatch.setattr("mesp_np.cli.gradcheck._checks", lambda args: [gradcheck.Check("a", np.inf, 1e-7, "")])
    assert main(["gradcheck", "--json"]) == 1
    assert capsys.readouterr().out == \
        '{"checks": {"a": {"max_relative_error": null, "tolerance": 1e-07, "passed": false}}}\n'
