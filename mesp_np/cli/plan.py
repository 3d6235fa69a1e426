"""The exact bytes of one training step, without touching a weight.

The step is run on arrays that have shapes and no memory, so what is printed is what a
real step takes, event for event.
"""

from rich.console import Console
from rich.table import Table

from mesp_np import plan_file
from mesp_np.checkpoint import adapter
from mesp_np.cli import choice, flags
from mesp_np.config import RunConfig
from mesp_np.engine import Engine, plan_step
from mesp_np.json_file import dumps
from mesp_np.ledger import CATEGORIES, show_bytes
from mesp_np.params import frozen_bytes
from mesp_np.planner import choose, free_knobs, plan_figures


def add_flags(parser):
    flags.add_model_flag(parser, presets=True)
    flags.add_config_flags(parser, RunConfig, flags.RUN_HELP)
    parser.add_argument("--adapter", metavar="DIR", help="take rank, alpha and targets from this adapter")
    flags.add_budget_flag(parser)
    parser.add_argument("--save", metavar="FILE", help="write the settings, for `mesp-np train --plan FILE`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args):
    settings = flags.run_config(args)
    name, config, weights = flags.config_and_weights(args)
    if args.adapter:
        with Engine(config, weights, settings) as phantom:
            adapter.fitting(args.adapter, phantom.parameters, settings)
    made = _choose(args, config, settings, weights)
    plan = plan_step(config, made.run if made else settings, weights=weights)
    if args.save:
        plan_file.save(args.save, config, plan.run, args.memory_budget or 0, plan)
    result = describe(plan, name, weights)
    if args.json:
        print(dumps(result | ({"choice": choice.describe(made)} if made else {})))
    else:
        report(result, Console(), made)


def _choose(args, config, settings, weights):
    """What the planner chose of that which was not given; None when all was, and there is no budget to keep to."""
    free, budget = free_knobs(flags.given(args, RunConfig)), args.memory_budget or 0
    if free or budget:
        return choose(config, settings, free, lambda run: plan_figures(config, run, weights=weights), budget)


def describe(plan, model, weights):
    """The plan as plain values, under the names of --json."""
    ledger, flops = plan.ledger, plan.flops
    return {"model": model, "method": plan.run.method, "keep": list(plan.run.keep), "batch": plan.shape[0],
            "seq": plan.shape[1], "rank": plan.run.rank, "loss": plan.run.loss, "update": plan.run.update,
            "stored_layers": plan.run.stored_layers, "checkpoint_every": plan.run.checkpoint_every,
            "checkpoint_store": plan.run.checkpoint_store, "row_tile": plan.run.row_tile,
            "optimizer": plan.run.optimizer, "dtype": plan.run.dtype, "threads": plan.run.threads,
            "trainable_parameters": plan.trainable_parameters,
            "residency": plan.run.residency, "frozen_weight_bytes": frozen_bytes(weights, plan.run),
            "live_peak_bytes": plan.live_peak_bytes, "extent_bytes": plan.extent_bytes,
            "stage_peak_bytes": ledger.stage_peak_bytes(), "category_bytes_at_peak": ledger.category_bytes_at_peak(),
            "at_peak": [tensor._asdict() for tensor in ledger.at_peak()],
            "flops": {phase: flops.get(phase, 0) for phase in ("forward", "recompute", "backward", "update")},
            "events": len(ledger.events)}


def report(result, console, made=None):
    """For a person: what was chosen, totals, stages, categories, and the largest tensors at the peak."""
    console.print(f"[bold]{result['model']}[/]  {result['method']}  batch {result['batch']} x {result['seq']}  "
                  f"rank {result['rank']}  loss {result['loss']}  update {result['update']}  {result['optimizer']}  "
                  f"{result['dtype']}  {result['threads']} threads", highlight=False)
    if made:
        choice.report(made, console)
    totals = Table.grid(padding=(0, 2))
    totals.add_row("live peak", show_bytes(result["live_peak_bytes"]))
    totals.add_row("extent", show_bytes(result["extent_bytes"]) + ", what the arena takes")
    totals.add_row("trained numbers", f"{result['trainable_parameters']:,}")
    where = "mapped and not counted" if result["residency"] == "mapped" else "widened, in the arena"
    totals.add_row("frozen weights", f"{show_bytes(result['frozen_weight_bytes'])}, {where}")
    totals.add_row("FLOPs", "  ".join(f"{phase} {count / 1e9:,.2f} G" for phase, count in result["flops"].items()))
    totals.add_row("events", f"{result['events']:,}")
    console.print(totals, highlight=False)
    whole, at_peak = result["live_peak_bytes"], result["category_bytes_at_peak"]
    _bars(console, "stage", result["stage_peak_bytes"], whole)
    _bars(console, "at the peak", dict(sorted(at_peak.items(), key=lambda item: -item[1])), whole, CATEGORIES)
    _tensors(console, result["at_peak"])


def _bars(console, title, sizes, whole, meanings=None, width=8):
    """A line for each size: its name, its bytes, its part of the whole, and what it is."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column(title, no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("", min_width=width)
    table.add_column("", style="dim")
    for name, size in sizes.items():
        table.add_row(name, show_bytes(size), "█" * round(width * size / whole), meanings[name] if meanings else "")
    console.print()
    console.print(table, highlight=False)


def _tensors(console, tensors, count=12):
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("largest tensors at the peak")
    table.add_column("bytes", justify="right")
    table.add_column("category")
    for tensor in tensors[:count]:
        table.add_row(tensor["name"], f"{tensor['bytes']:,}", tensor["category"])
    if len(tensors) > count:
        rest = tensors[count:]
        table.add_row(f"and {len(rest)} more", f"{sum(tensor['bytes'] for tensor in rest):,}", "")
    console.print()
    console.print(table, highlight=False)
