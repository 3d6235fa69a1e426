"""Lines of text that draw: bars, charts, rules, and bytes in columns, for the readout.

Each function gives a rich Text, parts of one, or plain strings; none knows what is trained.
"""

import math
from itertools import groupby

from rich.text import Text

from mesp_np.ledger import show_bytes

COLOURS = {"forward": "bright_blue", "loss": "magenta", "backward": "cyan", "update": "green"}
EIGHTHS = " ▁▂▃▄▅▆▇"
LABEL = 12                              # cells for a label


def clock(seconds):
    """`2:05`, or `1:02:05` from an hour on."""
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def fit(ranked, height):
    """The lines of (rank, line) pairs; while there are more than `height`, those of the highest rank go."""
    while len(ranked) > height:
        worst = max(rank for rank, _ in ranked)
        ranked = [pair for pair in ranked if pair[0] < worst]
    return [text for _, text in ranked]


def line(*parts):
    """A line from strings and (string, style) pairs, cut off where the terminal ends."""
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


def heading(left, right, width):
    """A rule with a text at each end."""
    return line((left, "bold"), " ", ("─" * max(1, width - len(left) - len(right) - 2), "dim"), " ", right)


def cell(label, value, form, width, pitch):
    """Parts of a figure: label and value at the ends of `width` cells, and blanks on to the next at `pitch`."""
    shown = "-" if value is None else format(value, form)
    return (label, "dim"), " " + shown.rjust(width - len(label) - 1), " " * (pitch - width)


def table(rows, scale, title, width):
    """A heading, and a line for each (label, bytes, bytes at the peak or None).

    The bytes are exact, and drawn as a bar on a scale of `scale` bytes; what they are at the
    peak is printed too where there is room.
    """
    widths = [len(part) for part in split_bytes(max(scale, *[size for _, size, _ in rows]))]
    column = sum(widths) + 3
    wide = width >= 100
    head = f"{'memory':{LABEL}}" + (f"{'now':>{column - 2}}{'at the peak':>{column}}" if wide else "")
    lines = [heading(head.rstrip(), title, width)]
    for label, size, peak in rows:
        numbers = exact(size, widths) + (exact(peak, widths) if wide else "")
        lines.append(line((f"{label:{LABEL}}", "dim"), numbers,
                          *bar(size, peak or 0, scale, width - LABEL - len(numbers), "cyan")))
    return lines


def split_bytes(count):
    """`12,345 B` and `(0.0 MiB)`."""
    exactly, about = show_bytes(count).split(" (")
    return exactly, "(" + about


def exact(count, widths):
    """show_bytes with its two parts flush right in columns of `widths`, and a gap; blank for None."""
    parts = ("", "") if count is None else split_bytes(count)
    return " ".join(part.rjust(width) for part, width in zip(parts, widths)) + "  "


def bar(size, more, scale, width, style):
    """Parts of a bar: heavy up to `size`, thin on to `more`; or, for a size beyond the scale, what is used of it."""
    if size > scale:
        return ((f"{100 * scale / size:.1f} % in use", "dim"),)
    heavy, both = (math.ceil(max(width, 0) * min(part, scale) / scale) for part in (size, max(size, more)))
    return ("━" * heavy, style), ("─" * (both - heavy), "dim")


def chart(values, rows):
    """Strings from the top, one column a value: the lowest is an eighth of a cell high, the highest is full."""
    low, high = min(values), max(values)
    scale = (8 * rows - 1) / (high - low) if high > low else 0
    heights = [1 + round((value - low) * scale) for value in values]
    columns = [("█" * (height // 8) + EIGHTHS[height % 8]).ljust(rows)[:rows] for height in heights]
    return ["".join(row) for row in zip(*columns)][::-1]


def sections(names):
    """(name, start, end) of each run of equal names."""
    found, start = [], 0
    for name, run in groupby(names):
        end = start + len(list(run))
        found.append((name, start, end))
        start = end
    return found


def paint(row, stages, done):
    """A row of the staircase in the colours of the stages, dim from column `done` on."""
    text = line(row)
    for stage, start, end in stages:
        text.stylize(COLOURS.get(stage, ""), start, end)
    text.stylize("dim", done)
    return text


def labels(stages):
    """A line with the name of each stage below it, moved left where the next is too near, or left out."""
    text = line()
    for stage, start, end in stages:
        at = min(start, end - len(stage) - 1)
        if at >= len(text) + bool(text):
            text.append(" " * (at - len(text))).append(stage, COLOURS.get(stage, ""))
    return text
