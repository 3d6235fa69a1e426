"""The readout: what is on the screen, that it fits the terminal, and that drawing never disturbs a step."""

import io
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from numba import njit
from rich.console import Console

from mesp_np import glyphs, live, readout
from mesp_np.arena import phantom
from mesp_np.batch import Batch
from mesp_np.config import PRESETS, RunConfig
from mesp_np.engine import Engine
from mesp_np.ledger import CATEGORIES, Ledger
from mesp_np.params import phantom_weights

SIZES = [(20, 4), (40, 10), (60, 12), (60, 20), (80, 24), (100, 30), (140, 40), (200, 60)]


def record(ledger, verb, name, size, category):
    ledger.record(verb, name, phantom((size,), np.int8), 0, category, "block.py:1")


def step_by_hand(ledger):
    """Two layers up, two layers down: 16 events, 1,700,000 bytes at the peak, at event 9."""
    ledger.restart()
    ledger.enter("forward")
    for layer in range(2):
        record(ledger, "alloc", f"layer.{layer}.x", 200_000, "checkpoint")
        record(ledger, "alloc", f"layer.{layer}.gate", 300_000, "temp")
        record(ledger, "free", f"layer.{layer}.gate", 300_000, "temp")
    ledger.enter("loss")
    record(ledger, "alloc", "final.logits", 100_000, "logits")
    record(ledger, "free", "final.logits", 100_000, "logits")
    ledger.enter("backward")
    for layer in (1, 0):
        record(ledger, "alloc", f"layer.{layer}.gate", 300_000, "kept")
        record(ledger, "free", f"layer.{layer}.gate", 300_000, "kept")
        record(ledger, "free", f"layer.{layer}.x", 200_000, "checkpoint")
    ledger.enter("update")
    record(ledger, "alloc", "squares", 8, "temp")
    record(ledger, "free", "squares", 8, "temp")


def engine_by_hand():
    """As much of an engine as the readout reads, one step done, stopped in the backward of the next."""
    ledger = Ledger()
    record(ledger, "alloc", "layers.0.self_attn.q_proj.lora_A", 1_000_000, "adapter")
    arena = SimpleNamespace(ledger=ledger, extent=1_800_000, capacity=1_800_000)
    return SimpleNamespace(arena=arena, method=SimpleNamespace(name="mesp-lean"))


def step_record(step=1, **changes):
    return dict(step=step, loss=4.1234, lr=1e-3, grad_norm=0.53, trained_tokens=1000, live_peak_bytes=1_700_000,
                extent_bytes=1_800_000, seconds=0.5) | changes


def terminal(width, height):
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, height=height)


def running(console, budget=4_000_000):
    """A live readout with one whole step behind it and the next in its backward."""
    shown, engine = live.LiveReadout(console), engine_by_hand()
    shown.begin(engine, 20, budget)
    step_by_hand(engine.arena.ledger)
    shown.step(step_record())
    shown.evaluation(dict(step=1, valid_loss=4.5, valid_perplexity=readout.perplexity(4.5)))
    ledger = engine.arena.ledger
    record(ledger, "alloc", "final.logits", 5_000_000, "logits")         # an evaluation: no part of the step
    record(ledger, "free", "final.logits", 5_000_000, "logits")
    ledger.restart()
    ledger.enter("backward")
    record(ledger, "alloc", "layer.1.gate", 300_000, "kept")
    return shown


def draw(shown):
    """The lines on the screen."""
    with shown.console.capture() as capture:
        shown.console.print(shown, end="")
    return capture.get().splitlines()


def row(lines, label):
    return next(text for text in lines if text.startswith(label))


def plain_lines(action, **settings):
    """What a plain readout writes while action(readout) runs."""
    file = io.StringIO()
    with readout.make(Console(file=file), live=True, **settings) as shown:
        action(shown)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width, height", SIZES)
@pytest.mark.parametrize("state", ["before", "running"])
def test_fits_the_terminal(width, height, state):
    shown = running(terminal(width, height))
    if state == "before":
        shown = live.LiveReadout(terminal(width, height))
        shown.begin(engine_by_hand(), 20)
    lines = draw(shown)
    assert 1 <= len(lines) <= height
    assert max(len(text) for text in lines) <= width
    assert lines[0].startswith("step  1/20" if state == "running" else "step  0/20")


def test_memory_is_exact():
    lines = draw(running(terminal(80, 40)))
    assert "1,300,000 B (1.2 MiB)" in row(lines, "live now")
    assert "1,700,000 B (1.6 MiB)" in row(lines, "live peak")
    assert "1,800,000 B (1.7 MiB)" in row(lines, "extent")
    assert "4,000,000 B (3.8 MiB)  45.0 % in use" in row(lines, "budget")
    assert "1,000,000 B (1.0 MiB)" in row(lines, "adapter")
    assert "  300,000 B (0.3 MiB)" in row(lines, "kept")
    assert row(lines, "memory").endswith(" backward, layer 1")


def test_categories_at_the_peak_add_up_to_it():
    lines = draw(running(terminal(140, 40)))
    at_peak = {name: int(row(lines, name).split("MiB)")[1].split(" B")[0].replace(",", ""))
               for name in (*CATEGORIES, "live now") if any(text.startswith(name) for text in lines)}
    total = at_peak.pop("live now")
    assert total == sum(at_peak.values()) == 1_700_000
    assert at_peak == dict(adapter=1_000_000, checkpoint=400_000, temp=300_000, kept=0, logits=0)


def test_bars_are_heavy_up_to_now_and_thin_on_to_the_peak():
    lines = draw(running(terminal(80, 40)))
    cells = {name: (row(lines, name).count("━"), row(lines, name).count("─")) for name in ("extent", "adapter", "temp")}
    whole = cells["extent"][0]
    assert cells["extent"] == (whole, 0)
    assert cells["adapter"] == (math.ceil(whole / 1.8), 0)
    assert cells["temp"] == (0, math.ceil(whole * 0.3 / 1.8))


def test_figures():
    text = "\n".join(draw(running(terminal(80, 40))))
    for label, value in [("loss", "4.1234"), ("valid loss", "4.5000"), ("perplexity", "90.02"),
                         ("learning rate", "1.00e-03"), ("gradient norm", "0.5300"), ("tokens/s", "2,000")]:
        assert f" {value}" in text.split(label, 1)[1].split("\n")[0]


def test_a_low_terminal_loses_the_least_important_first():
    least_last = ["step", "loss", "live now", "adapter", "checkpoint", "live bytes", "kept"]
    left = [[name for name in least_last if any(text.startswith(name) for text in draw(running(terminal(80, height))))]
            for height in range(1, 24)]
    assert [len(names) for names in left] == sorted(len(names) for names in left)
    assert all(names == least_last[:len(names)] for names in left)


def test_staircase_is_that_of_the_last_whole_step():
    lines = draw(running(terminal(80, 40)))
    first = next(i for i, text in enumerate(lines) if text.startswith("live bytes over step 1 "))
    assert lines[first].endswith(" 1.0 to 1.6 MiB")
    columns = list(zip(*[text.ljust(16) for text in lines[first + 1:first + 9]]))       # eight rows high, at most
    heights = [sum(glyph == "█" for glyph in column) for column in columns]
    assert heights.index(max(heights)) == 4                  # the second layer's gate
    assert heights[0] < heights[1] and heights[-1] == 0


def test_loss_curve_leaves_out_what_is_not_finite():
    shown = running(terminal(80, 40))
    shown.step(step_record(2, loss=math.nan))
    assert not any(text.startswith("loss ─") for text in draw(shown))
    shown.step(step_record(3, loss=3.5))
    assert row(draw(shown), "loss ─").endswith(" 3.5000 to 4.1234")


def test_time_left_and_time_taken(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(live, "time", clock)
    shown = running(terminal(80, 40))
    assert draw(shown)[0].endswith(" 0:10 left")             # 19 steps of half a second
    clock.now = 103.0
    assert draw(shown)[0].endswith(" 0:06 left")
    shown.step(step_record(20))
    assert "100 %" in draw(shown)[0] and draw(shown)[0].endswith(" in 0:03")


def test_nothing_to_do():
    shown = live.LiveReadout(terminal(80, 24))
    assert draw(shown) == []
    shown.begin(engine_by_hand(), 0)
    assert draw(shown)[0].startswith("step 0/0")


def test_drawing_while_an_engine_works():
    """The display reads a ledger that moves, and the steps' events are what they are without it."""
    config, run = PRESETS["tiny"], RunConfig(batch_size=1, seq=8)
    shown, draws = live.LiveReadout(terminal(140, 40)), []
    drawer = threading.Thread(target=lambda: [draws.append(draw(shown)) for _ in range(20)])
    with Engine(config, phantom_weights(config), run) as engine:
        ledger = engine.arena.ledger
        engine.step([Batch.phantom((1, 8))], rate=1.0)
        quiet = ledger.events
        shown.begin(engine, 10**6)
        drawer.start()
        while drawer.is_alive():
            engine.step([Batch.phantom((1, 8))], rate=1.0)
            shown.step(step_record(engine.steps, live_peak_bytes=ledger.live_peak))
            assert ledger.events == quiet
    assert len(draws) == 20
    assert row(draws[-1], "forward").split() == ["forward", "loss", "backward", "update"]


def test_plain_lines():
    def action(shown):
        shown.begin(engine_by_hand(), 200, 4_000_000)
        for step in range(1, 3):
            shown.step(step_record(step))
        shown.evaluation(dict(step=2, valid_loss=800.0, valid_perplexity=readout.perplexity(800.0)))
        shown.message("saved [adapter]")

    assert plain_lines(action) == [
        "200 steps, method mesp-lean, arena 1,800,000 B (1.7 MiB), budget 4,000,000 B (3.8 MiB)",
        "step   1/200  loss 4.1234  lr 1.00e-03  grad norm 0.5300  2000 tok/s  live peak 1,700,000 B (1.6 MiB)",
        "step   2/200  loss 4.1234  lr 1.00e-03  grad norm 0.5300  2000 tok/s  live peak 1,700,000 B (1.6 MiB)",
        "step   2/200  valid loss 800.0000  perplexity inf",
        "saved [adapter]"]


def test_plain_lines_now_and_then_and_at_the_last():
    def action(shown):
        shown.begin(engine_by_hand(), 7)
        for step in range(1, 8):
            shown.step(step_record(step))

    assert [text.split()[1] for text in plain_lines(action, every=3)[1:]] == ["3/7", "6/7", "7/7"]


def test_compiling_counts_kernels_and_not_what_they_call():
    @njit
    def inner(x):
        return x + 1

    @njit
    def outer(x):
        return inner(x) * 2

    def action(shown):
        with shown.compiling():
            assert outer(1) == 4
            assert outer(1.0) == 4.0
        with shown.compiling():
            outer(2)                                         # compiled before: nothing to say

    before, after = plain_lines(action)
    assert before == "compiling kernels (first run only)"
    assert after.startswith("compiled 2 kernels in ") and after.endswith(" s")


def test_live_display_while_compiling():
    shown = running(terminal(80, 24))
    with shown.compiling():
        assert draw(shown)[0].startswith("step")
        shown.kernels.on_start(None)
        assert draw(shown)[0].startswith("compiling kernels (first run only), 0 so far ─")
        shown.kernels.on_end(None)
        assert draw(shown)[0].startswith("compiling kernels (first run only), 1 so far ─")
    assert draw(shown)[0].startswith("step")


def test_live_only_where_it_can_be_shown(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(readout.make(terminal(80, 24), live=True), live.LiveReadout)
    assert isinstance(readout.make(terminal(80, 24), live=False), readout.PlainReadout)
    assert isinstance(readout.make(Console(file=io.StringIO()), live=True), readout.PlainReadout)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(readout.make(terminal(80, 24), live=True), readout.PlainReadout)


def test_no_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    shown = running(Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80, height=24))
    assert not any(f"\x1b[{colour}" in text for text in draw(shown) for colour in (3, 9))


def test_live_display_ends_with_its_last_state(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    console = terminal(80, 24)
    with running(console) as shown:
        shown.message("saved")
        shown.step(step_record(20))
    text = console.file.getvalue()
    assert "saved" in text and "step 20/20" in text
    assert text.endswith("\x1b[?25h")                        # the cursor is back


def test_smoothing_forgets_the_step_that_compiled():
    pace = readout.Pace().after(1000, 60.0)
    assert pace.tokens_per_second == pytest.approx(1000 / 60)
    pace = pace.after(1000, 0.5)
    assert (pace.tokens_per_second, pace.seconds_per_step) == (2000, 0.5)
    pace = pace.after(1000, 1.5)
    assert pace.seconds_per_step == pytest.approx((0.9 * 0.5 + 1.5) / 1.9)


@pytest.mark.parametrize("loss, expected", [(0.0, 1.0), (1.0, math.e), (800.0, math.inf), (math.inf, math.inf)])
def test_perplexity(loss, expected):
    assert readout.perplexity(loss) == expected


def test_perplexity_of_nan():
    assert math.isnan(readout.perplexity(math.nan))


@pytest.mark.parametrize("name, stage, expected", [
    ("layer.3.x", "forward", "forward, layer 3"), ("layers.11.mlp.up_proj.lora_A.grad", "update", "update, layer 11"),
    ("model.layers.2.mlp.up_proj.weight.grad", "backward", "backward, layer 2"), ("final.xn", "loss", "loss")])
def test_where(name, stage, expected):
    ledger = Ledger()
    ledger.enter(stage)
    assert live.where(ledger) == stage
    record(ledger, "alloc", name, 1, "temp")
    assert live.where(ledger) == expected


@pytest.mark.parametrize("seconds, expected", [(-3, "0:00"), (125.4, "2:05"), (3599.7, "1:00:00"), (3725, "1:02:05")])
def test_clock(seconds, expected):
    assert glyphs.clock(seconds) == expected


def test_chart_spans_its_rows():
    assert glyphs.chart([0, 15], 2) == [" █", "▁█"]
    assert glyphs.chart([5, 5], 1) == ["▁▁"]
    assert glyphs.chart([0, 7, 8, 15], 2) == ["  ▁█", "▁███"]


def test_labels_move_left_of_a_near_neighbour():
    stages = [("forward", 0, 20), ("loss", 20, 22), ("backward", 22, 40), ("update", 40, 42)]
    assert str(glyphs.labels(stages)) == "forward          loss backward     update"
    assert str(glyphs.labels([("forward", 0, 3), ("loss", 3, 4)])) == ""
