"""Seconds and bytes of a step: this engine beside PyTorch + PEFT, JAX and mlx-lm, in one run.

    python tools/bench.py --preset qwen2.5-0.5b --seq 256 --rounds 7 --out tools/results/qwen2.5-0.5b.json
    python tools/bench.py --model smollm2
    python tools/bench.py --scale --preset qwen2.5-0.5b --forms 4bit --lengths 128,256,512,1024

The others are installed, in pinned versions, into an environment of their own; what cannot be had is listed as not
run, with the reason.  All are given the same numbers, adapter and tokens (benchmarks/inputs.py), and compute the same
step: LoRA on all seven projections, SGD, the gradient's norm.

Agreement  comes first: the gradient of every adapter is compared with this engine's own (benchmarks/agreement.py).
           What computes something else is not measured.
Memory     What a system counts as its bytes is said in its file: benchmarks/pytorch.py, jax_remat.py, mlx_lm_cpu.py.
Time       A process each, blocked on a pipe while another works; rounds go through all of them in turn.  The machine
           should be quiet.  Seconds of one machine say little of another: read the ratios of one run.
"""

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from benchmarks import environment, inputs, report, scale
from benchmarks.measure import System, examine_all, start, time_rounds
from benchmarks.worker import Failed

from mesp_np import PRESETS, RunConfig
from mesp_np.cli import flags
from mesp_np.errors import UserError
from mesp_np.json_file import dumps
from mesp_np.methods import METHODS

RUN_FLAGS = ("seq", "rank", "alpha", "loss", "row_tile", "checkpoint_every", "checkpoint_store", "mezo_eps",
             "threads", "seed")
RATE = 1e-12                     # so small that every step meets the same numbers
MEZO_EPS = 3e-4                  # with more a real model is not linear, with less its loss too coarse
PYTORCH = ("checkpointing", "plain", "checkpointing, chunked loss")
PEERS = {                        # name on the command line -> group of packages, module, name, variants, spec
    "pytorch": ("pytorch", "pytorch", "PyTorch float32",
                (*PYTORCH, "chunked loss", "MeZO", "MeZO, chunked loss"), {"dtype": "float32"}),
    "pytorch-bf16": ("pytorch", "pytorch", "PyTorch bf16", PYTORCH, {"dtype": "bfloat16"}),
    "jax": ("jax", "jax_remat", "JAX", ("remat", "remat, chunked loss"), {}),
    "mlx": ("mlx", "mlx_lm_cpu", "mlx-lm", ("plain", "checkpointing"), {})}
PEERS_FORM = "f32"               # what all others are given
BASELINE = f"PyTorch float32, {PYTORCH[0]}"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=PRESETS, default="qwen2.5-0.5b", help="shapes, with random weights")
    model.add_argument("--model", help="a folder in Hugging Face form")
    parser.add_argument("--systems", type=names(PEERS), default=",".join(PEERS), help="to measure beside this engine")
    parser.add_argument("--methods", type=names(), default="mesp-lean,mebp,mezo,forward", help="ours; the first is the "
                        "reference of all gradients; forward: a forward pass")
    parser.add_argument("--forms", type=names(inputs.FORMS), default=",".join(inputs.FORMS), help="how our weights are "
                        "stored, the reference's first; a folder has its own form, and f32")
    parser.add_argument("--compute", type=names(("full", "bf16")), dest="computes", default="full", help="ours; as in "
                        "full,bf16")
    flags.add_config_flags(parser, RunConfig, {name: flags.RUN_HELP[name] for name in RUN_FLAGS})
    parser.add_argument("--rounds", type=count, default=5, help="timed steps of each (default: 5)")
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS", help="what takes longer is timed once "
                        "(default: 60)")
    parser.add_argument("--scale", action="store_true", help="our first method alone, at several lengths")
    parser.add_argument("--lengths", type=counts, default="128,256,512,1024,2048,4096,8192", help="for --scale")
    parser.add_argument("--venv", type=Path, default=environment.default_folder(), help="the others' environment, "
                        "made if missing (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="JSON", help="write the result here, and the table beside it")
    args = parser.parse_args()
    if not args.methods or args.methods[0] not in METHODS or not METHODS[args.methods[0]].exact:
        parser.error("--methods must begin with an exact method, the reference of all gradients")
    if args.out and (args.out.is_dir() or not os.access(args.out.parent, os.W_OK)):
        parser.error(f"--out {args.out}: cannot be written; name a file in a folder that is there")
    return args


def count(text):
    """A type for argparse: 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


def counts(text):
    """A type for argparse: such numbers, as in 128,256."""
    return [count(part) for part in text.split(",")]


def names(allowed=None):
    """A type for argparse: a list as in a,b."""
    def listed(text):
        made = tuple(part for part in text.split(",") if part)
        if unknown := [name for name in made if allowed and name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(allowed)}")
        return made
    return listed


def ours(args, forms):
    """This engine's systems; the first variant of the first is the reference."""
    return [System(f"mesp_np {form}" + ", compute bf16" * (compute == "bf16"), "benchmarks.ours", sys.executable,
                   args.methods, {"form": str(folder), "compute": compute})
            for compute in args.computes for form, folder in forms.items() if form in args.forms]


def peers(args):
    """(the others' systems, their packages' versions, name -> why it is not run)"""
    chosen = [PEERS[name] for name in args.systems]
    if not chosen:
        return [], {}, {}
    python, failed = environment.make(args.venv, dict.fromkeys(group for group, *_ in chosen))
    systems = [System(name, f"benchmarks.{module}", python, variants, spec)
               for group, module, name, variants, spec in chosen if group not in failed]
    missing = {name: failed[group] for group, _, name, *_ in chosen if group in failed}
    return systems, environment.versions(python), missing


def prepare(args, run, scratch):
    """(form -> folder, what every system is given)"""
    wanted = args.forms if args.scale else dict.fromkeys((*args.forms, PEERS_FORM))
    config, forms = inputs.forms(args.model or args.preset, wanted, run.seed, scratch)
    inputs.write_adapter(scratch / "adapter", config, run)
    D, F = config.hidden_size, config.intermediate_size
    return forms, {
        "folder": str(forms.get(PEERS_FORM)), "adapter": str(scratch / "adapter"), "config": config.to_json(),
        "run": asdict(run), "tokens": inputs.tokens(config.vocab_size, run), "rate": RATE, "threads": run.threads,
        "products": [(run.seq, D, F), (run.seq, F, D), (run.seq, D, D)]}


def measured(args, scratch, stack):
    """The result of a run."""
    run = flags.run_config(args, batch_size=1, optimizer="sgd", weight_decay=0.0, mezo_eps=MEZO_EPS)
    forms, common = prepare(args, run, scratch)
    machine = start(System("machine", "benchmarks.machine", sys.executable), common, scratch, stack)
    result = {"command": report.command(), "commit": report.commit(), "machine": report.machine(),
              "versions": report.versions(), "setting": {
                  "model": args.model or args.preset, "length": "T" if args.scale else run.seq, "rounds": args.rounds,
                  "run": asdict(run)},
              "not_run": {f"mesp_np {form}": "the folder's numbers are stored otherwise"
                          for form in args.forms if form not in forms}}
    if args.scale:
        rates = [machine.ask("rate")]
        rows = scale.measure(ours(args, forms)[0], common, run, args.lengths, args.rounds, scratch)
        rates.append(machine.ask("rate"))
    else:
        others, versions, missing = peers(args)
        rows, places, not_run = examine_all(ours(args, forms) + others, common, scratch, stack)
        rates = time_rounds(rows, places, not_run, machine, args.rounds, args.patience)
        result["versions"] |= versions
        result["not_run"] |= missing | not_run
    result |= {"rows": rows, "flops_per_second": rates, "baseline": BASELINE if BASELINE in rows else next(iter(rows))}
    return report.complete(result)


def main():
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="mesp-np-bench-") as scratch, ExitStack() as stack:
        result = measured(args, Path(scratch), stack)
    text = report.markdown(result)
    print(text)
    if args.out:
        args.out.write_text(dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    try:
        main()
    except (UserError, Failed) as error:
        raise SystemExit(str(error)) from None
