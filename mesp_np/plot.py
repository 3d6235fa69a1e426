"""A run's loss and memory over its steps, drawn by Matplotlib (the extra `plot`).

    read(run_dir)        the lines of log.jsonl
    draw(records, path)  a picture of them, in the form that the path's ending names
    picture(draw, ...)   the bytes of what a function draws, here and in the study
"""

import io
import json
from pathlib import Path

from mesp_np.checkpoint.atomic import new_file
from mesp_np.errors import UserError

NEEDED = ("step", "loss", "live_peak_bytes", "extent_bytes", "os_growth_bytes")
LINES = {"live_peak_bytes": ("live peak", "#c1440e", "-"), "extent_bytes": ("extent", "#1b4965", "--"),
         "os_growth_bytes": ("process grew by", "#7a7a7a", ":")}
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "mesp_np", "font.size": 9, "axes.spines.top": False,
         "axes.spines.right": False, "axes.titlelocation": "left", "legend.frameon": False}
INSTALL = "pip install 'mesp-np[plot]'"
MIB = 2 ** 20


def read(run_dir):
    """The records of a run, a dict a step; a last line that was cut off is left out.  Raises UserError."""
    path = Path(run_dir) / "log.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})",
                        "name the --run-dir of a `mesp-np train`") from None
    whole = [(number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]
    records = [_record(path, number, line) for number, line in whole]
    if not records:
        raise UserError(f"{path}: has no step yet", "wait for the first one, or name another run")
    return records


def draw(records, path, title):
    """Write the picture of a run.  Raises UserError without Matplotlib, or when the system refuses."""
    def both(figure):
        upper, lower = figure.subplots(2, 1, sharex=True)
        _losses(upper, records, title)
        _bytes(lower, records)

    drawn = picture(both, (7.2, 5.6), Path(path).suffix.removeprefix("."))
    with new_file(path) as file:
        file.write(drawn)


def picture(draw, size, form):
    """The bytes, in this form, of a figure of `size` inches that draw(figure) fills: the same each time.

    Raises UserError without Matplotlib.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("Matplotlib is not installed, which draws the pictures", INSTALL) from None
    with rc_context(STYLE):
        figure, out = Figure(figsize=size, layout="constrained"), io.BytesIO()
        draw(figure)
        unsaid = dict.fromkeys(("Date", "Creator")) if form == "svg" else None
        figure.savefig(out, format=form, dpi=150, metadata=unsaid)
    return out.getvalue()


def _losses(axes, records, title):
    axes.plot([one["step"] for one in records], [one["loss"] for one in records], color="#1b4965", linewidth=0.9,
              label="a step's batch")
    held_out = [(one["step"], one["valid_loss"]) for one in records if one.get("valid_loss") is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="#c1440e", markersize=3.5, label="held out")
    axes.set(title=title, ylabel="loss per token")
    axes.legend()


def _bytes(axes, records):
    steps = [one["step"] for one in records]
    for name, (label, color, style) in LINES.items():
        axes.plot(steps, [one[name] / MIB for one in records], style, color=color, label=label)
    axes.set(xlabel="step", ylabel="MiB", ylim=(0, None))
    axes.legend()


def _record(path, number, line):
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(found.get(name), int | float) for name in NEEDED):
        raise UserError(f"{path}: line {number} is no step of a run", "remove it, or name another run")
    return found
