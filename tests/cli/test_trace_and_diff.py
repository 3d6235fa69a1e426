"""mesp-np trace and mesp-np diff."""

import json

import pytest

from mesp_np.cli import main

SMALL = ["--model", "tiny", "--batch-size", "1", "--seq", "32", "--threads", "1"]


@pytest.fixture
def traced(tmp_path, capsys):
    """A function: the folder of a step's trace."""
    def made(name, *flags):
        assert main(["trace", str(tmp_path / name), *SMALL, *flags]) == 0
        return str(tmp_path / name)
    return made


def compared(capsys, a, b):
    capsys.readouterr()
    assert main(["diff", a, b, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def planned(capsys, tmp_path, name, *flags):
    capsys.readouterr()
    assert main(["plan", *SMALL, "--json", *flags]) == 0
    (tmp_path / name).write_text(capsys.readouterr().out)
    return str(tmp_path / name)


def test_a_trace_says_where_its_files_are(traced, tmp_path, capsys):
    folder = traced("one", "--method", "mesp")
    out = capsys.readouterr().out
    for file in ("ledger.json", "trace.json", "snapshot.pickle"):
        assert f"{folder}/{file}" in out and (tmp_path / "one" / file).stat().st_size > 1000
    assert main(["trace", folder, *SMALL]) == 1
    assert "is there already; name a new folder" in capsys.readouterr().err


def test_nothing_differs(traced, capsys):
    a, b = traced("a"), traced("b")
    found = compared(capsys, a, b)
    assert found["tensors"] == {} and found["first_event"] is None
    assert found["live_peak_bytes"][0] == found["live_peak_bytes"][1]
    assert main(["diff", a, b]) == 0
    assert "the same tensors at the peak" in capsys.readouterr().out


def test_the_tensors_make_the_whole_difference(traced, capsys):
    found = compared(capsys, traced("a", "--method", "mesp"), traced("b", "--method", "mebp"))
    sides = list(zip(*found["tensors"].values(), strict=True))
    peaks = found["live_peak_bytes"]
    assert sum(sides[1]) - sum(sides[0]) == peaks[1] - peaks[0] > 0
    assert [sum(totals) for totals in zip(*found["categories"].values(), strict=True)] == peaks
    assert any(one == 0 < other for one, other in found["tensors"].values())      # mebp keeps what mesp forms again
    index, one, other = found["first_event"]
    assert index > 0 and one["category"] != other["category"]              # kept in one, for the moment in the other


def test_a_plan_and_a_trace_of_one_step(traced, tmp_path, capsys):
    plan = planned(capsys, tmp_path, "plan.json", "--method", "mesp")
    found = compared(capsys, plan, traced("a", "--method", "mesp"))
    assert found["tensors"] == {} and found["first_event"] is None


def test_a_difference_for_a_person(traced, capsys):
    a, b = traced("a", "--rank", "4"), traced("b", "--rank", "8")
    capsys.readouterr()
    assert main(["diff", a, b]) == 0
    out = capsys.readouterr().out
    assert "adapter" in out and "tensors that differ" in out and "more, which --json lists" in out


@pytest.mark.parametrize("text, words", [
    (None, "cannot be read"), ("[1]", "holds no JSON object"), ("{}", "says neither"),
    ('{"at_peak": [1]}', "says neither"),
    ('{"at_peak": [], "live_peak_bytes": 0, "events": [1]}', "says neither"),
    ('{"at_peak": [{"name": "x", "bytes": "1", "category": "temp"}], "live_peak_bytes": 1}', "says neither")])
def test_what_is_no_step_is_one_clear_line(tmp_path, capsys, text, words):
    file = tmp_path / "file.json"
    if text:
        file.write_text(text)
    assert main(["diff", str(file), str(file)]) == 1
    error = capsys.readouterr().err
    assert f"{file}: " in error and words in error and "mesp-np plan --json" in error and len(error.splitlines()) == 1
