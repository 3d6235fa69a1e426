"""The live display of a run in a terminal.

It is drawn by rich's thread, four times a second, from the ledger that the training thread
writes.  No lock is needed: a look-up by key and a copy of a list are each atomic under the
interpreter lock, and everything else that is drawn is put in place whole, by one assignment.
So training never waits for the display.

From the top: steps and time; loss and speed; memory now, in all and by category, each with
a bar that is heavy up to now and thin on to the peak; live bytes over the last whole step,
a staircase up in the forward and a saw-tooth down in the backward; the loss.  Every line
has a rank, and a terminal that is too low loses the lines of the highest ranks.
"""

import math
import re
import time
from copy import copy
from functools import cached_property

from rich.live import Live
from rich.text import Text

from mesp_np.glyphs import (
    bar,
    cell,
    chart,
    clock,
    fit,
    heading,
    labels,
    line,
    paint,
    sections,
    table,
)
from mesp_np.ledger import CATEGORIES, spans
from mesp_np.readout import Readout

PROGRESS, FIGURES, TOTALS, CATEGORY, STAIRCASE, LOSSES, BLANK = 0, 1, 2, 3, 6, 20, 30      # ranks of lines
LAYER = re.compile(r"\blayers?\.(\d+)\.")
GAP = 4                                 # cells between figures


class LiveReadout(Readout):
    """The display.  It is a rich renderable: `console.print(readout)` draws it once."""

    def __init__(self, console):
        super().__init__(console)
        self._live = Live(self, console=console, refresh_per_second=4, vertical_overflow="crop")
        self._last = None                        # LastStep
        self._valid = {}                         # record of the last evaluation
        self._losses = []
        self._began = 0.0                        # time.monotonic, seconds

    def __enter__(self):
        self._live.start()
        return self

    def __exit__(self, *_):
        self._live.stop()

    def begin(self, engine, steps, budget_bytes=None):
        self._began = time.monotonic()
        super().begin(engine, steps, budget_bytes)

    def step(self, record):
        super().step(record)
        self._losses.append(record["loss"])
        self._last = LastStep(record, self.engine.arena.ledger)

    def evaluation(self, record):
        self._valid = record

    def __rich_console__(self, console, options):
        if self.engine:
            yield from fit(self._lines(options.max_width, options.size.height), options.size.height)

    def _lines(self, width, height):
        """(rank, line) from the top; the two charts share what the other lines leave of the height."""
        top = [(PROGRESS, self._progress(width))] + [(FIGURES, row) for row in self._figures(width)]
        memory = self._memory(width)
        spare = height - len(top) - len(memory)
        losses = min(spare // 3, 6) if spare >= 7 else 0
        staircase = self._staircase(width, min(max(spare - losses, 3), 10) - 2)
        blank = [(BLANK, Text())]
        return (top + blank + memory + blank + [(STAIRCASE, row) for row in staircase]
                + blank + [(LOSSES, row) for row in self._loss_curve(width, losses - 1)])

    def _progress(self, width):
        """Steps and time; while kernels are compiled, how many there are so far."""
        kernels, elapsed = self.kernels, time.monotonic() - self._began
        if kernels and kernels.active:
            return heading(f"compiling kernels (first run only), {kernels.count} so far", clock(elapsed), width)
        done = self._last.record["step"] if self._last else 0
        left = f"step {done:>{len(str(self.steps))}}/{self.steps} "
        total = max(self.steps, done, 1)
        right = f" {100 * done // total:3} %  {self._time():>12}"
        return line((left, "bold"), *bar(done, total, total, width - len(left) - len(right), "green"), right)

    def _time(self):
        """Time left; after the last step, time taken."""
        last = self._last
        if not last:
            return ""
        steps_left = self.steps - last.record["step"]
        if steps_left <= 0:
            return "in " + clock(last.ended - self._began)
        return clock(steps_left * self.pace.seconds_per_step - (time.monotonic() - last.ended)) + " left"

    def _figures(self, width):
        """Loss, speed and the like: two rows of three, or three of two in a narrow terminal."""
        record, valid = self._last.record if self._last else {}, self._valid
        speed = self.pace.tokens_per_second if record else None
        rows = [(("loss", record.get("loss"), ".4f"), ("learning rate", record.get("lr"), ".2e"),
                 ("tokens/s", speed, ",.0f")),
                (("valid loss", valid.get("valid_loss"), ".4f"), ("perplexity", valid.get("valid_perplexity"), ".4g"),
                 ("gradient norm", record.get("grad_norm"), ".4f"))]
        if width < 76:
            rows = list(zip(*rows))
        pitch = (width + GAP) // len(rows[0])
        return [line(*[part for figure in row for part in cell(*figure, min(pitch - GAP, 28), pitch)]) for row in rows]

    def _memory(self, width):
        """(rank, line) of the totals and the categories; those smallest at the peak are the first to go."""
        arena, last = self.engine.arena, self._last
        now = {category: arena.ledger.live_by_category[category] for category in CATEGORIES}
        at_peak = last.at_peak if last else now
        shown = [category for category in CATEGORIES if now[category] or category in at_peak]
        peak = max(arena.ledger.live_peak, last.ledger.live_peak if last else 0)
        rows = [("live now", sum(now.values()), peak), ("live peak", peak, None), ("extent", arena.extent, None)]
        if self.budget_bytes:
            rows.append(("budget", self.budget_bytes, None))
        by_size = sorted(shown, key=lambda category: -at_peak.get(category, 0))
        ranks = [TOTALS] * (1 + len(rows)) + [CATEGORY + by_size.index(category) for category in shown]
        rows += [(category, now[category], at_peak.get(category, 0)) for category in shown]
        return list(zip(ranks, table(rows, max(peak, arena.extent, 1), where(arena.ledger), width)))

    def _staircase(self, width, rows):
        """Live bytes over the last whole step, or as far as the first has come.

        When steps are slow, the part that the present step has yet to go through is dim.
        """
        now, last = self.engine.arena.ledger, self._last
        shown = last.ledger if last else now
        columns = spans(shown.events, width)
        values = [max(event.live for event in column) for column in columns] or [shown.live]
        stages = sections(column[0].stage for column in columns)
        slow = last and last.record["seconds"] > 1
        done = len(values) * len(now.events) // len(shown.events) if slow else len(values)
        title = f"live bytes over step {last.record['step']}" if last else "live bytes"
        low, high = (f"{value / 2**20:.1f}" for value in (min(values), max(values)))
        return [heading(title, f"{low} to {high} MiB", width),
                *[paint(row, stages, done) for row in chart(values, rows)], labels(stages)]

    def _loss_curve(self, width, rows):
        """The mean loss of each span of steps; nothing without room, or before there are two finite losses."""
        losses = [loss for loss in self._losses if math.isfinite(loss)]
        if rows < 1 or len(losses) < 2:
            return []
        means = [sum(span) / len(span) for span in spans(losses, width)]
        title = heading("loss", f"{min(means):.4f} to {max(means):.4f}", width)
        return [title] + [line((row, "yellow")) for row in chart(means, rows)]


class LastStep:
    """A step that is done, to be drawn while the next one runs.

    record  as given to `step`; ended  time.monotonic, seconds
    ledger  as it was then: `restart` gives the engine's own ledger new lists
    """

    def __init__(self, record, ledger):
        self.record, self.ended = record, time.monotonic()
        self.ledger = copy(ledger)
        self.ledger.events = list(ledger.events)

    @cached_property
    def at_peak(self):
        """Bytes at the live peak of every category that held any at some time of the step."""
        names = {tensor.category for tensor in (*self.ledger.opening.values(), *self.ledger.events)}
        return dict.fromkeys(names, 0) | self.ledger.category_bytes_at_peak()


def where(ledger):
    """What is being worked on, by the last event: `backward, layer 3`, or the stage alone."""
    events = ledger.events
    layer = LAYER.search(events[-1].name) if events else None
    return f"{ledger.stage}, layer {layer[1]}" if layer else ledger.stage
