"""A table of figures, none of which is ever cut."""

from rich.table import Table

GAP = 2                          # a space on each side of a column


def show(console, titles, lines, text=()):
    """Print a table; columns that do not fit side by side follow below, beside the first one again.

    titles  of the columns, the first of which names the lines
    lines   a tuple of strings for each
    text    titles of columns that hold words and no figures
    """
    first, *rest = zip(titles, *lines)
    while rest:
        count = _that_fit(rest, console.width - _width(first))
        console.print()
        console.print(_table([first, *rest[:count]], text), highlight=False, crop=False)
        rest = rest[count:]


def _that_fit(columns, width):
    """How many of the columns fit into `width` characters; one at least."""
    count = 1
    while count < len(columns) and sum(map(_width, columns[:count + 1])) <= width:
        count += 1
    return count


def _table(columns, text):
    """The columns, each with its title, as a table of their own width whatever the console's is."""
    table = Table(box=None, padding=(0, GAP // 2), header_style="bold", width=sum(map(_width, columns)))
    for index, column in enumerate(columns):
        table.add_column(column[0], justify="left" if index == 0 or column[0] in text else "right", no_wrap=True)
    for line in zip(*(column[1:] for column in columns)):
        table.add_row(*line)
    return table


def _width(column):
    return GAP + max(map(len, column))
