"""What the planner chose, for a person and for --json."""

from rich.table import Table

from mesp_np.cli.flags import RUN_HELP
from mesp_np.ledger import show_bytes


def describe(made):
    """A planner.Choice as plain values, under the names of --json."""
    larger = None
    if made.larger:
        budget, run, saved = made.larger
        larger = {"memory_budget": budget, "changes": made.changes(run), "work_saved": saved}
    return {"memory_budget": made.budget, "automatic": made.automatic, "fits": made.fits, "chosen": made.settings(),
            "extent_bytes": made.figures.extent_bytes, "beside_bytes": made.figures.beside_bytes,
            "live_peak_bytes": made.figures.live_peak_bytes, "flops": made.figures.flops,
            "work_of_fastest": made.slower, "larger": larger, "plans": made.planned}


def report(made, console):
    """A table of the knobs, what the choice takes, and what a larger budget would buy."""
    why = "half of the free memory; no bit of what is trained depends on it" if made.automatic else "--memory-budget"
    what = ("fastest within" if made.free else "fits into") if made.fits else "the smallest there is, beyond"
    console.print(f"{what} {show_bytes(made.budget)}, {why}", highlight=False)
    table = Table(box=None, padding=(0, 2), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for name, value in made.settings().items():
        table.add_row(name, str(value), RUN_HELP[name])
    console.print(table, highlight=False)
    beside = f", samples {show_bytes(made.figures.beside_bytes)}" if made.figures.beside_bytes else ""
    console.print(f"extent {show_bytes(made.figures.extent_bytes)}{beside}, live peak "
                  f"{show_bytes(made.figures.live_peak_bytes)}", highlight=False)
    console.print(f"{made.figures.flops / 1e9:,.2f} GFLOP a step; {_others(made)}", highlight=False)


def _others(made):
    """How much faster the fastest is, and what the next round budget would buy, by modelled work."""
    if not made.free:
        return "nothing was left to choose"
    if not made.larger:
        return "nothing is faster"
    budget, run, saved = made.larger
    changes = ", ".join(f"{name} {value}" for name, value in made.changes(run).items())
    return (f"{made.slower:.2f} times the work of the fastest; with {budget / 2**20:,.1f} MiB: "
            f"{100 * saved:.1f} % less ({changes})")
