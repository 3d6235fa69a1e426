"""The study's page, in HTML and Markdown, with every number from the JSON and into the CSV beside it.

    OUT/data/SECTION.json   what a section measured
    OUT/data/TABLE.csv      its tables
    OUT/report.html         one page, the figures in it as SVG; OUT/report.md the same without figures
"""

import csv
import io
from pathlib import Path

from jinja2 import Environment

from mesp_np import __version__
from mesp_np.checkpoint.atomic import new_file
from mesp_np.study import charts

TITLE = "What exact low-memory fine-tuning costs"
NOTE = (f"Made by mesp_np {__version__}. Bytes are exact: of every tensor that a step holds, adapters and gradients "
        "included, frozen weights not. MB are 10^6 bytes.")
SHOWN = 12                               # rows of a table in the Markdown


def write(out, found):
    """Write the page and the tables of `found`, Section -> data.  Raises UserError without Matplotlib."""
    sections = [_section(section, data) for section, data in found.items()]
    for section, data in found.items():
        for table in section.tables(data):
            _write(out / "data" / f"{table.name}.csv", _csv(table))
    page = Environment(autoescape=True, trim_blocks=True).from_string(
        Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    _write(out / "report.html", page.render(title=TITLE, note=NOTE, sections=sections))
    _write(out / "report.md", _markdown(sections))


def _section(section, data):
    """What the templates need of a section, as plain values."""
    return {"name": section.name, "title": section.title, "text": section.text(data),
            "figures": [(caption, charts.svg(draw)) for caption, draw in section.figures(data).items()],
            "tables": [_table(table) for table in section.tables(data)]}


def _table(table):
    words = [at for at in range(len(table.columns)) if any(isinstance(row[at], str) for row in table.rows)]
    return {"caption": table.caption, "columns": table.columns, "words": words, "file": f"data/{table.name}.csv",
            "lines": [[_cell(value) for value in row] for row in table.rows]}


def _cell(value):
    """A value for a person: whole numbers with commas, others with three places, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else value


def _csv(table):
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([table.columns, *table.rows])
    return out.getvalue()


def _markdown(sections):
    parts = [f"# {TITLE}", NOTE]
    for section in sections:
        parts += [f"## {section['title']}", *section["text"]]
        for table in section["tables"]:
            lines = [table["columns"], ["---"] * len(table["columns"]), *table["lines"][:SHOWN]]
            more = len(table["lines"]) - SHOWN
            where = f"{more} more rows in {table['file']}" if more > 0 else table["file"]
            parts += [f"{table['caption']} ({where})",
                      "\n".join("| " + " | ".join(line) + " |" for line in lines)]
    return "\n\n".join(parts) + "\n"


def _write(path, text):
    with new_file(path) as file:
        file.write(text.encode())
