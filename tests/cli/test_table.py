"""Tables on any console: whatever its width, every figure is there, whole and beside its name."""

import io

import pytest
from rich.console import Console

from mesp_np.cli.table import show

TITLES = ("category", "first", "second-method", "third", "what it is")
LINES = [("adapter", "1,234,567,890", "12", "345", "matrices"), ("grad", "7", "98,765,432", "0", "of what is trained")]


def printed(width):
    console = Console(width=width, file=io.StringIO())
    show(console, TITLES, LINES, text=("what it is",))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [1, 10, 24, 40, 60, 80, 200])
def test_no_figure_is_cut_at_any_width(width):
    lines = printed(width).splitlines()
    for name, *cells in LINES:
        words = "  ".join(line for line in lines if line.split()[:1] == [name])
        assert all(f" {cell} " in words for cell in cells), words
    assert all(title in "\n".join(lines) for title in TITLES) and "\u2026" not in "".join(lines)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_lines_are_no_wider_than_the_console(width):
    assert max(map(len, printed(width).splitlines())) <= width


def test_columns_stand_side_by_side_where_they_fit():
    assert len(printed(80).split()) == len(printed(200).split())
    assert printed(200).count("category") == 1 < printed(40).count("category")
