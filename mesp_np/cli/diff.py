"""Two plans, or two traces, compared by name: which tensors make the difference.

A and B are files that `mesp-np plan --json` printed, or folders that `mesp-np trace` made.
"""

from rich.console import Console

from mesp_np.cli.table import show
from mesp_np.difference import difference, load
from mesp_np.json_file import dumps

LISTED = 20


def add_flags(parser):
    parser.add_argument("a", metavar="A", help="a plan's JSON, or a trace's folder")
    parser.add_argument("b", metavar="B", help="another")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args):
    found = difference(load(args.a), load(args.b))
    if args.json:
        print(dumps(found))
    else:
        report(found, Console())


def report(found, console):
    """Totals, categories, and the tensors that differ most."""
    show(console, ("bytes at the peak", "A", "B", "B - A"),
         [_line(name, sizes) for name, sizes in {"all": found["live_peak_bytes"], **found["categories"]}.items()])
    tensors = found["tensors"]
    if tensors:
        show(console, ("tensors that differ", "A", "B", "B - A"),
             [_line(name, sizes) for name, sizes in list(tensors.items())[:LISTED]])
        if len(tensors) > LISTED:
            console.print(f"and {len(tensors) - LISTED} more, which --json lists", highlight=False)
    else:
        console.print("\nthe same tensors at the peak", highlight=False)
    if found["first_event"]:
        index, *events = found["first_event"]
        words = [f"{event.get('verb')} {event.get('name')} ({event.get('category')})" if event else "the end"
                 for event in events]
        console.print(f"\nevents part at {index:,}: {words[0]} in A, {words[1]} in B", markup=False, highlight=False)


def _line(name, sizes):
    return name, *(f"{size:,}" for size in sizes), f"{sizes[1] - sizes[0]:+,}"
