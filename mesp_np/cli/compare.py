"""Methods side by side on the same batch: exact bytes, equal bits, FLOPs and seconds.

Bytes are those of one step.  `bits` counts the gradient's numbers whose bits differ from those of
an exact method that rounds nothing, `error` is the length of the difference to that gradient over
its own length; MeZO's gradient is an estimate, whose cosine is shown beside the theory's.
"""

from dataclasses import asdict

import numpy as np
from rich.console import Console

from mesp_np.batch import Batch
from mesp_np.cli import flags
from mesp_np.cli.table import show
from mesp_np.compare import compare, describe, reference_run, theory_cosine
from mesp_np.config import RunConfig
from mesp_np.data import rows
from mesp_np.data.batches import Batches
from mesp_np.data.encode import Encoder
from mesp_np.errors import UsageError
from mesp_np.json_file import dumps
from mesp_np.ledger import CATEGORIES
from mesp_np.methods import METHODS, find
from mesp_np.ops.bf16 import backend

OWN = {name: text for name, text in flags.RUN_HELP.items() if name not in ("method", "keep", "grad_accumulation")}


def add_flags(parser):
    flags.add_model_flag(parser)
    parser.add_argument("--data", metavar="PATH", help="take the batch from here (default: random tokens)")
    parser.add_argument("--methods", default=",".join(METHODS), metavar="A,B", help="default: all of them")
    parser.add_argument("--baseline", default=None, metavar="METHOD", help="count savings against it (default: mebp if "
                        "it is there, else the first)")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each method (default: 3)")
    flags.add_config_flags(parser, RunConfig, OWN)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args):
    names = [find(name).name for name in args.methods.split(",") if name]
    baseline = args.baseline or ("mebp" if "mebp" in names else names[0] if names else "")
    if baseline not in names or len(set(names)) < len(names) or args.rounds < 1:
        raise UsageError(f"--methods {args.methods} --baseline {baseline} --rounds {args.rounds}",
                         "name each method once, the baseline among them, and at least one round")
    settings = flags.run_config(args)
    runs = [flags.with_method(settings, name) for name in names]
    checkpoint = flags.checkpoint(args)
    console = Console(stderr=args.json, quiet=args.json)
    batch = _batch(args, checkpoint, settings)
    with console.status("") as status:
        contenders = compare(checkpoint.config, checkpoint.weights, runs, batch, args.rounds, status.update)
    result = describe(contenders, baseline)
    if args.json:
        print(dumps({"run": asdict(settings) | {"model": str(checkpoint.folder)}, "methods": result}))
    else:
        _report(console, result, contenders, baseline, batch.ids.shape)


def _batch(args, checkpoint, settings):
    """The first batch of the data, or random tokens with a target everywhere."""
    if args.data:
        encoder = Encoder(checkpoint.tokenizer, checkpoint.chat)
        train, _ = rows.load(args.data, encoder, settings.seq, settings.seed)
        return Batches(train, settings.batch_size, settings.seq, settings.seed).batch(0)
    rng = np.random.default_rng(settings.seed)
    return Batch.of(*rng.integers(0, checkpoint.config.vocab_size, (2, settings.batch_size, settings.seq)))


def _report(console, result, contenders, baseline, shape):
    (B, T), settings = shape, contenders[0].engine.run
    console.print(f"batch {B} x {T}, rank {settings.rank}, loss {settings.loss}, update {settings.update}, "
                  f"{settings.optimizer}, {settings.threads} threads", highlight=False)
    if settings.compute == "bf16":
        console.print(f"products of bfloat16 by {backend()}", highlight=False)
    show(console, ("method", "live peak, bytes", "plan", f"against {baseline}", "bits", "cosine", "error"), [
        (name, f"{row['live_peak_bytes']:,}",
         "equal" if row["live_peak_bytes"] == row["planned_live_peak_bytes"] else "[red]DIFFERS[/]",
         f"{-row['saved_bytes']:+,}", f"{row['gradient_bits_different']:,}", f"{row['gradient_cosine']:.6f}",
         f"{row['gradient_relative_error']:.1e}") for name, row in result.items()])
    reference = reference_run([one.engine.run for one in contenders])
    console.print(f"bits, cosine, error: of the gradient, against {reference.method} with --compute full and "
                  f"--checkpoint-store ram", style="dim")
    show(console, ("MiB", "forward", "loss", "backward", "update", "extent", "OS", "process", "weights", "s/step",
                   "GFLOP"), [
        (name, *map(_mib, (*row["stage_peak_bytes"].values(), row["extent_bytes"], row["os_growth_bytes"],
                           row["resident_bytes"], row["weight_resident_bytes"])),
         f"{row['seconds_per_step']:.3f}", f"{row['recomputed_flops'] / 1e9:.2f}") for name, row in result.items()])
    console.print("OS: growth of the process's own memory with a first step; process: all of it, interpreter and "
                  "libraries included; weights: pages of mapped weights within that; GFLOP: forward work done again in "
                  "a step", style="dim")
    _categories(console, result)
    if len(result) > 1:
        _differences(console, result, baseline)
    for one in contenders:
        if not one.engine.method.exact:
            d, n = one.engine.trainable_parameters, one.engine.run.probes
            console.print(f"\n{one.name}: |cosine| {abs(one.gradient_cosine):.2e}, {n} probe(s) in {d:,} dimensions;"
                          f" the theory's mean is {theory_cosine(d, n):.2e}", highlight=False)


def _mib(size):
    return "-" if size is None else f"{size / 2**20:.1f}"


def _categories(console, result):
    """The live peak by category, which adds up to it exactly, and what each category holds."""
    peaks = {name: row["category_bytes_at_peak"] for name, row in result.items()}
    as_planned = all(peaks[name] == row["planned_category_bytes_at_peak"] for name, row in result.items())
    used = [category for category in CATEGORIES if any(category in peak for peak in peaks.values())]
    show(console, ("bytes at the peak", *result, "what it is"), [
        (category, *[f"{peak.get(category, 0):,}" for peak in peaks.values()], CATEGORIES[category])
        for category in used], text=("what it is",))
    console.print(f"each equal to its plan: {'yes' if as_planned else 'NO'}", style="dim")


def _differences(console, result, baseline, most=8):
    """The names that make the difference, with their bytes at the two peaks."""
    console.print(f"\n[bold]what makes the difference to {baseline}[/], bytes at the two peaks", highlight=False)
    for name, row in result.items():
        parts = [f"{tensor} {-size:+,}" for tensor, size in row["differs_in"].items()]
        if parts:
            console.print(f" {name}: {', '.join(parts[:most])}{', ...' if len(parts) > most else ''}", highlight=False)
