"""The study: its numbers are those of plans and steps, and its page holds nothing but them."""

import csv
import json
import re

import pytest

from mesp_np.cli import main, study
from mesp_np.config import PRESETS, RunConfig
from mesp_np.engine import plan_step
from mesp_np.json_file import object_bytes
from mesp_np.methods import METHODS
from mesp_np.study import ablation, charts, gradients, memory, picture, published, report, timing

SMALL = {"models": ["tiny"], "seqs": [32, 64], "ranks": [2, 8], "model": "tiny", "seq": 64, "rounds": 2,
         "draws": 24, "gradient_seq": 16, "trained": 3}
SECTIONS = tuple(study.SECTIONS.values())


@pytest.fixture(scope="module")
def found():
    """What each section measured, as it is read back from its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "RUN", memory.RUN | {"model": "tiny"})
        yield {section: json.loads(object_bytes(section.measure(SMALL, lambda text: None))) for section in SECTIONS}


def test_every_cell_is_the_plan_and_its_parts_add_up(found):
    rows = found[memory.SECTION]["rows"]
    assert len(rows) == 4 * len(memory.LOSSES) * len(METHODS)
    for row in rows[::7]:
        plan = plan_step(PRESETS[row["model"]], memory.run_config(row))
        assert row["live_peak_bytes"] == plan.live_peak_bytes == sum(row["parts"].values())
        assert row["extent_bytes"] == plan.extent_bytes


def test_cells_that_are_run_take_what_was_planned(found):
    ran = [row for row in found[memory.SECTION]["rows"] if "run_extent_bytes" in row]
    assert {row["method"] for row in ran} == set(METHODS)
    for row in ran:
        assert (row["run_live_peak_bytes"], row["run_extent_bytes"]) == (row["live_peak_bytes"], row["extent_bytes"])


def test_whole_logits_are_the_loss_s_part_of_a_peak():
    cell = {"model": "qwen2.5-0.5b", "seq": 128, "rank": 8, "loss": "full", "method": "mesp"}
    row = memory._row(cell, lambda text: None)
    assert row["parts"]["loss"] == 4 * 128 * PRESETS["qwen2.5-0.5b"].vocab_size


def test_h_is_worth_what_the_tensors_say(found):
    one = found[ablation.SECTION]["models"]["tiny"]
    R, N = ablation.RANK, ablation.SEQ
    assert one["h_bytes"] == 7 * 4 * N * R
    sides = list(zip(*one["tensors"].values(), strict=True))
    assert sum(sides[0]) - sum(sides[1]) == one["peaks"]["mebp"] - one["peaks"]["mesp"] > 0
    assert one["recomputed_flops"]["mesp"] > one["recomputed_flops"]["mesp-store-h"]


def test_seconds_and_flops_are_those_of_steps(found):
    data = found[timing.SECTION]
    assert set(data["methods"]) == set(METHODS) and data["seq"] == 64
    for name, one in data["methods"].items():
        assert len(one["seconds"]) == 2 and min(one["seconds"]) > 0
        run = RunConfig(method=name, batch_size=1, seq=64, optimizer="sgd", threads=2)
        assert {phase: count for phase, count in one["flops"].items() if count} == dict(plan_step(
            PRESETS["tiny"], run).flops)


def test_estimates_are_as_good_as_theory_says(found):
    data = found[gradients.SECTION]
    assert [row["when"] for row in data["rows"]] == 5 * ["before"] + 5 * ["after"]
    for row in data["rows"]:
        if row["eps"] != 1e-4:                     # smaller than that, a loss in float32 is too coarse
            assert 0.5 < row["cosine"] / row["cosine_theory"] < 1.6
            assert 0.6 < row["relative_error"] / row["relative_error_theory"] < 1.5
        assert abs(row["signs_agree"] - 0.5) < 0.05
    for row in data["layers"]:
        assert abs(row["signed_mean"]) <= row["mean_magnitude"] < 4 * row["magnitude_theory"]


def test_a_curve_reaches_the_peak_and_its_categories_add_up():
    cell = {"method": "mesp", "seq": 64, "rank": 8, "loss": "full"}
    ledger = plan_step(PRESETS["tiny"], memory.run_config(cell)).ledger
    for points in (20, 10 ** 6):
        curve = picture.curve(ledger, points)
        totals = [sum(sizes) for sizes in zip(*curve["bytes"].values(), strict=True)]
        assert totals == [ledger.events[at].live for at in curve["events"]] and max(totals) == ledger.live_peak
        assert ledger.events[curve["peak_at"]].live == ledger.live_peak
    assert len(curve["events"]) == len(ledger.events)


def test_reported_figures_are_found_by_their_setting():
    assert published.peak("qwen2.5-0.5b", 256, 8, "mesp") == 136.2
    assert published.peak("qwen2.5-0.5b", 256, 8, "store") is None and published.peak("tiny", 1, 1, "mesp") is None


def test_the_page_is_made_of_the_numbers_beside_it(found, tmp_path):
    pytest.importorskip("matplotlib")
    report.write(tmp_path, found)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert page.count("<svg") == sum(len(section.figures(data)) for section, data in found.items())
    assert "http" not in re.sub(r'xmlns\S*="[^"]*"|"http://[^"]*"', "", page)                   # nothing is fetched
    for section, data in found.items():
        assert f'<h2 id="{section.name}">' in page and f"## {section.title}" in text
        for table in section.tables(data):
            lines = list(csv.reader(open(tmp_path / "data" / f"{table.name}.csv")))
            assert tuple(lines[0]) == table.columns and len(lines) == len(table.rows) + 1
            assert all(len(line) == len(table.columns) for line in lines)
    peak = next(row for row in found[memory.SECTION]["rows"] if "run_extent_bytes" in row)["live_peak_bytes"]
    assert f"{peak:,}" in page and f"{peak:,}" in text


def test_pages_are_the_same_bytes_again(found, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        report.write(tmp_path / name, found)
    assert (tmp_path / "one" / "report.html").read_bytes() == (tmp_path / "two" / "report.html").read_bytes()


def test_a_figure_fits_any_width():
    pytest.importorskip("matplotlib")
    element = charts.svg(lambda figure: figure.subplots().plot([1, 2]))
    head = element[:element.index(">")]
    assert head.startswith("<svg") and "viewBox" in head and "width=" not in head and "height=" not in head


def test_measured_sections_are_not_measured_again(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(memory, "cells", lambda settings: [])
    made = []
    one = memory.Section("memory", "A section", lambda *_: made.append(1) or {"rows": []}, lambda data: [],
                         lambda data: {}, lambda data: ["a sentence"])
    monkeypatch.setattr(study, "SECTIONS", {"memory": one})
    for _ in range(2):
        assert main(["study", str(tmp_path / "out")]) == 0
    assert made == [1] and "a sentence" in (tmp_path / "out" / "report.html").read_text()
    (tmp_path / "out" / "data" / "memory.json").write_text("[")
    assert main(["study", str(tmp_path / "out")]) == 1
    assert "memory.json: is not JSON" in capsys.readouterr().err
