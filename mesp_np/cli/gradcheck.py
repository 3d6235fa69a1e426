"""Finite differences against the hand-derived gradients, in float64, through the same kernels.

Exit code 1 when a check fails.  `op` can be followed by a name, as in `gradcheck op lora`.
"""

from rich.console import Console
from rich.table import Table

from mesp_np import model_checks
from mesp_np.errors import UsageError
from mesp_np.gradcheck import check_ops
from mesp_np.json_file import dumps
from mesp_np.readout import make

PARTS = ("op", "block", "model", "all")


def add_flags(parser):
    parser.add_argument("part", nargs="?", default="all", choices=PARTS, help="what to check (default: all)")
    parser.add_argument("name", nargs="?", help="with `op`: only ops whose name begins so")
    parser.add_argument("--exhaustive", action="store_true", help="every element by itself, not three directions")
    parser.add_argument("--seed", type=int, default=0, help="decides the inputs and the directions")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args):
    if args.name and args.part != "op":
        raise UsageError(f"gradcheck {args.part} takes no name", "`mesp-np gradcheck op NAME` checks one op")
    with make(Console(stderr=True), live=False).compiling():
        checks = list(_checks(args))
    if not checks:
        raise UsageError(f"no op is called {args.name!r}", "`mesp-np show` lists the ops")
    if args.json:
        print(dumps({"checks": {check.name: _values(check) for check in checks}}))
    else:
        _report(checks, Console())
    return 0 if all(check.passed for check in checks) else 1


def _checks(args):
    if args.part in ("op", "all"):
        yield from check_ops(args.exhaustive, args.seed, only=args.name or "")
    if args.part in ("block", "all"):
        yield from model_checks.check_block(args.exhaustive, args.seed)
    if args.part in ("model", "all"):
        yield from model_checks.check_model(args.exhaustive, args.seed)


def _values(check):
    return {"max_relative_error": check.max_relative_error, "tolerance": check.tolerance, "passed": check.passed}


def _report(checks, console):
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for title, side in (("gradient of", "left"), ("largest error", "right"), ("tolerance", "right"), ("", "left")):
        table.add_column(title, justify=side)
    for check in checks:
        verdict = "[green]passed[/]" if check.passed else f"[red]FAILED[/] {check.where}"
        table.add_row(check.name, f"{check.max_relative_error:.1e}", f"{check.tolerance:.0e}", verdict)
    console.print(table, highlight=False)
    failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks)} gradients checked, {failed} failed", highlight=False)
