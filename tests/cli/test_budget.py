"""--memory-budget, and plans that are saved and used again."""

import json
import shutil

import pytest

from mesp_np import planner
from mesp_np.cli import main
from mesp_np.planner import EXACT, KNOBS
from tests.training import log, train

PLAN = ["--seq", "32", "--batch-size", "2", "--rank", "2", "--threads", "1"]       # as training.FAST


def plan(capsys, *flags):
    assert main(["plan", *flags, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def extents(run_dir):
    return {line["extent_bytes"] for line in log(run_dir)}


def settings(run_dir):
    return json.loads((run_dir / "config.json").read_text())


def smallest(capsys, command):
    """The figure in the refusal of a budget of one byte."""
    capsys.readouterr()
    assert main([*command, "--memory-budget", "1"]) == 1
    error = capsys.readouterr().err
    assert "--memory-budget is 1 B" in error and len(error.splitlines()) == 1
    return int(error.split("the smallest is ")[1].split(" B")[0].replace(",", ""))


def test_plan_chooses_what_fits(model, capsys):
    flags = "--model", "tiny", "--batch-size", "1", "--seq", "64"
    found, roomy = (plan(capsys, *flags, "--memory-budget", size) for size in ("3MiB", "4MiB"))
    assert found["extent_bytes"] <= 3 * 2 ** 20 < roomy["extent_bytes"] <= 4 * 2 ** 20
    choice = found["choice"]
    assert set(choice["chosen"]) == set(KNOBS) and not choice["automatic"]
    assert {name: found[name] for name in KNOBS} == choice["chosen"]
    assert found["extent_bytes"] == choice["extent_bytes"] and sum(found["flops"].values()) == choice["flops"]
    assert choice["larger"]["memory_budget"] == 4 * 2 ** 20 and choice["larger"]["work_saved"] > 0
    assert choice["work_of_fastest"] > 1


def test_a_choice_for_a_person(capsys):
    assert main(["plan", "--model", "tiny", "--batch-size", "1", "--seq", "64", "--memory-budget", "3MiB"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fastest within 3,145,728 B (3.0 MiB), --memory-budget" in out
    assert "checkpoint_store" in out and "times the work of the fastest; with 4.0 MiB: " in out
    assert main(["plan", "--model", "tiny"]) == 0
    assert "half of the free memory; no bit" in capsys.readouterr().out.replace("\n", " ")
    assert main(["plan", "--model", "tiny", "--method", "mesp", "--memory-budget", "1GiB"]) == 0
    out = capsys.readouterr().out
    assert "fits into 1,073,741,824 B" in out and "fastest" not in out and "nothing was left to choose" in out


def test_when_the_machine_is_full_it_is_said(capsys, monkeypatch):
    monkeypatch.setattr(planner, "free_memory", lambda: 2000)
    assert main(["plan", "--model", "tiny"]) == 0
    assert "the smallest there is, beyond 1,000 B" in capsys.readouterr().out
    assert not plan(capsys, "--model", "tiny")["choice"]["fits"]


def test_a_method_that_is_given_is_planned_as_it_is(capsys):
    for flags in (["--memory-budget", "1GiB"], []):
        found = plan(capsys, "--model", "tiny", "--method", "mesp", *flags)
        assert found["method"] == "mesp" and found["stored_layers"] == 0 and found["update"] == "after"
    need = found["extent_bytes"]
    for size, code in ((need, 0), (need - 1, 1)):
        assert main(["plan", "--model", "tiny", "--method", "mesp", "--memory-budget", str(size)]) == code
    assert f"the smallest is {need:,} B" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "train"])
def test_the_smallest_figure_works_and_a_byte_less_does_not(model, data, tmp_path, capsys, command):
    line = ["plan", "--model", model, *PLAN] if command == "plan" else [
        "train", "--model", model, "--data", data, "--run-dir", str(tmp_path / "run"), *PLAN, "--iters", "2",
        "--sample-tokens", "5"]
    size = smallest(capsys, line)
    assert main([*line, "--memory-budget", str(size - 1)]) == 1 and not (tmp_path / "run").exists()
    assert main([*line, "--memory-budget", str(size)]) == 0


def test_a_run_within_a_budget(model, data, tmp_path, capsys):
    """It takes what was planned, of a batch that is shorter than --seq, and computes what an ample one computes."""
    adapters = []
    for name, size in (("ample", "1GiB"), ("tight", "400KiB"), ("free", None)):
        run = tmp_path / name
        budget = ["--memory-budget", size] if size else []
        assert train(model, data, run, "--iters", "3", "--seq", "60", "--row-tile", "256", "--json", *budget) == 0
        choice = json.loads(capsys.readouterr().out)["choice"]
        assert max(extents(run)) == choice["extent_bytes"]
        assert choice["extent_bytes"] + choice["beside_bytes"] <= choice["memory_budget"]
        assert {key: settings(run)[key] for key in choice["chosen"]} == choice["chosen"]
        assert set(choice["chosen"]) == set(KNOBS if size else EXACT) - {"row_tile"}
        adapters.append((run / "adapter" / "adapter_model.safetensors").read_bytes())
    assert settings(tmp_path / "tight")["stored_layers"] < settings(tmp_path / "ample")["stored_layers"] == 2
    assert adapters[0] == adapters[1] == adapters[2]


def test_without_a_budget_results_are_those_of_any_method(model, data, tmp_path):
    for name, flags in (("auto", []), ("lean", ["--method", "mesp-lean"]), ("store", ["--method", "store"])):
        assert train(model, data, tmp_path / name, "--iters", "3", *flags) == 0
    assert settings(tmp_path / "auto")["stored_layers"] == 2 and settings(tmp_path / "lean")["stored_layers"] == 0
    assert len({(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes()
                for name in ("auto", "lean", "store")}) == 1
    assert "chosen" not in settings(tmp_path / "lean")


@pytest.mark.parametrize("flags, code, words", [
    (["--method", "store", "--checkpoint-store", "disk"], 2, "--checkpoint-store has no effect with --method store"),
    (["--method", "store-lean", "--stored-layers", "1"], 2, "--stored-layers has no effect with --method store-lean"),
    (["--method", "mezo", "--checkpoint-every", "2"], 2, "--checkpoint-every has no effect with --method mezo"),
    (["--method", "mezo", "--update", "fused"], 2, "--update has no effect with --method mezo"),
    (["--method", "mesp", "--checkpoint-every", "2", "--update", "fused"], 0, "")])
def test_flags_without_an_effect_are_refused(capsys, flags, code, words):
    assert main(["plan", "--model", "tiny", *flags]) == code
    assert words in capsys.readouterr().err


def test_samples_count(model, data, tmp_path, capsys):
    line = ["train", "--model", model, "--data", data, "--run-dir", str(tmp_path / "run"), *PLAN, "--iters", "1"]
    none, some, more = (smallest(capsys, [*line, "--sample-tokens", count]) for count in ("0", "9", "20"))
    assert none < some < more


def test_held_out_rows_that_are_longer_count(model, tmp_path, capsys):
    sizes = []
    for count in (3, 50):
        for name, length in (("train", 3), ("valid", count)):
            (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{"ab" * length}"}}\n' * 4)
        sizes.append(smallest(capsys, ["train", "--model", model, "--data", str(tmp_path), "--run-dir",
                                       str(tmp_path / "run"), "--seq", "64", "--iters", "1", "--sample-tokens", "0"]))
    assert sizes[0] < sizes[1]


def test_a_longer_batch_that_takes_less_is_not_what_is_planned_by(model, tmp_path, capsys):
    """A tile of 256 holds both rows of 128, and one of two of 144: where both lengths occur, the shorter decides."""
    longer = tmp_path / "model"
    shutil.copytree(model, longer)
    config = json.loads((longer / "config.json").read_text())
    (longer / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 256}))
    line = ["train", "--model", str(longer), "--seq", "144", "--batch-size", "2", "--iters", "8", "--row-tile", "256",
            "--sample-tokens", "0"]
    sizes = []
    for lengths in ([125] * 8, [140] * 8, [125] * 8 + [140] * 8):
        data = tmp_path / f"{len(sizes)}.jsonl"
        data.write_text("".join(f'{{"text": "{"a" * length}"}}\n' for length in lengths))
        sizes.append(smallest(capsys, [*line, "--data", str(data), "--run-dir", str(tmp_path / "no")]))
    assert sizes[2] == sizes[0] > sizes[1]
    assert main([*line, "--data", str(data), "--run-dir", str(tmp_path / "run"), "--memory-budget", str(sizes[2])]) == 0
    peaks = [line["live_peak_bytes"] for line in log(tmp_path / "run")]
    assert len(set(peaks)) > 1 and peaks[-1] < max(peaks)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["live_peak_bytes"] == max(peaks)


def test_a_plan_that_does_not_suit_this_machine_is_named(model, data, tmp_path, capsys):
    file = tmp_path / "plan.json"
    plan(capsys, "--model", model, *PLAN, "--save", str(file))
    text = json.loads(file.read_text())
    text["run"]["threads"] = 10 ** 6
    file.write_text(json.dumps(text))
    capsys.readouterr()
    line = ["train", "--model", model, "--data", data, "--run-dir", str(tmp_path / "run"), "--plan", str(file)]
    assert main(line) == 1
    assert f"{file}: threads is 1000000" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_saved_plan_is_used_again(model, data, tmp_path, capsys):
    file = tmp_path / "plan.json"
    found = plan(capsys, "--model", model, *PLAN, "--memory-budget", "400KiB", "--row-tile", "32", "--save", str(file))
    use = ["train", "--model", model, "--data", data, "--plan", str(file), "--iters", "2", "--sample-tokens", "5"]
    assert main([*use, "--run-dir", str(tmp_path / "run"), "--seed", "3"]) == 0
    used = settings(tmp_path / "run")
    assert {name: used[name] for name in KNOBS} == found["choice"]["chosen"] | {"row_tile": 32}
    assert used["plan"] == str(file) and used["seed"] == 3 and used["rank"] == 2
    assert max(extents(tmp_path / "run")) == found["extent_bytes"]
    capsys.readouterr()
    for flags, code, words in (
            (["--rank", "4"], 2, f"--rank differs from that of {file}; leave it out; the plan decides"),
            (["--stored-layers", "1", "--method", "store"], 2, "differs from that of"),
            (["--rank", "2", "--memory-budget", "10KiB"], 1, "--memory-budget is 10,240 B"),
            (["--memory-budget", "400KiB"], 1, "for the samples before and after")):
        assert main([*use, *flags, "--run-dir", str(tmp_path / "no")]) == code
        assert words in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_a_plan_of_another_model_is_refused_before_data_is_read(model, tmp_path, capsys):
    file = tmp_path / "plan.json"
    plan(capsys, "--model", "tiny", "--save", str(file))
    assert main(["train", "--model", model, "--data", "/nowhere", "--plan", str(file)]) == 1
    error = capsys.readouterr().err
    assert f"{file}: " in error and "is for a model with hidden_size 128, this one has 48" in error


@pytest.mark.parametrize("text, words", [(None, "cannot be read"), ("{}", "model is missing"), ("[", "is not JSON")])
def test_what_is_no_plan_is_one_clear_line(model, data, tmp_path, capsys, text, words):
    file = tmp_path / "plan.json"
    if text:
        file.write_text(text)
    assert train(model, data, tmp_path / "run", "--plan", str(file)) == 1
    error = capsys.readouterr().err
    assert str(file) in error and words in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_full_disk_leaves_the_plan_that_was_there(tmp_path, capsys, full_disk):
    file = tmp_path / "plan.json"
    save = ["plan", "--model", "tiny", "--save", str(file)]
    assert main(save) == 0
    before = file.read_bytes()
    assert main(["plan", "--model", "tiny", "--save", str(tmp_path)]) == 1
    assert f"{tmp_path}: is no ordinary file" in capsys.readouterr().err
    with full_disk(100):
        assert main([*save, "--rank", "2"]) == 1
    assert "plan.json: cannot be written" in capsys.readouterr().err
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
