"""What these methods cost and give, measured by this engine: the sections of `mesp-np study`.

    published.py   the figures that papers report
    memory.py      bytes at the peak, of every method, length and rank
    ablation.py    what h is worth; which tensors make the difference between MeBP and MeSP
    picture.py     live bytes over the events of a step
    timing.py      FLOPs and seconds of a step
    gradients.py   MeZO's estimates beside the gradient
    report.py      the page, in HTML and Markdown, from the sections' data alone

A section measures, which may take long, and then tells: tables, figures and sentences are made of
what it measured, which is kept as JSON and CSV.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """One part of the study.

    measure  (settings, progress) -> plain values, for JSON; `progress(text)` is called now and then
    tables   data -> list of Table
    figures  data -> caption -> function that draws on a matplotlib Figure
    text     data -> list of paragraphs
    """

    name: str
    title: str
    measure: Callable
    tables: Callable
    figures: Callable
    text: Callable


@dataclass(frozen=True)
class Table:
    """name  of its CSV file; rows  tuples of numbers and strings, under `columns`"""

    name: str
    caption: str
    columns: tuple
    rows: list
