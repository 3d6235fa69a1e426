"""Agreement first, then memory, then time, of systems in processes of their own."""

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks import agreement
from benchmarks.worker import Failed, Worker


@dataclass(frozen=True)
class System:
    """A process to start: its module, interpreter, variants, and what its spec has beside what all are given."""

    name: str
    module: str
    python: Path
    variants: tuple = ()
    spec: dict = None


def start(system, common, scratch, stack):
    """The system's Worker, which lives as long as the ExitStack.  Raises Failed."""
    path = scratch / f"{system.name}.json"
    path.write_text(json.dumps(common | {"variants": system.variants} | (system.spec or {})))
    return stack.enter_context(closing(Worker(system.python, system.module, path, path.with_suffix(".log"))))


def examine(worker, variant, reference, scratch):
    """(a row without its times, what was computed).  Raises Failed when that is not what the reference computed.

    reference  (loss, gradients) of the first row, or None for that row itself
    """
    about, path = worker.about[variant], scratch / "gradients.npz"
    loss, first = worker.ask("gradients", variant, str(path)), worker.seconds
    computed, limit = (loss, agreement.take(path)), agreement.LIMITS[about["kind"]]
    difference = float(agreement.difference(about["kind"], computed, reference or computed))
    if not difference <= limit:
        raise Failed(f"computes something else: loss {loss:.6f}, {difference:.1e} from the reference by the measure "
                     f"`{about['kind']}`, of which {limit:g} is allowed")
    row = about | {"loss": loss, "difference": difference, "first_seconds": first, "seconds": []}
    return row | worker.ask("memory", variant), computed


def examine_all(systems, common, scratch, stack):
    """(name -> row, name -> (Worker, variant), name -> why there is no row); the first row is the reference."""
    rows, places, not_run, reference = {}, {}, {}, None
    for system in systems:
        try:
            worker = start(system, common, scratch, stack)
        except Failed as failed:
            worker, not_run[system.name] = None, str(failed)
        for variant in system.variants if worker else ():
            name = f"{system.name}, {variant}"
            print(name, file=sys.stderr)
            try:
                rows[name], computed = examine(worker, variant, reference, scratch)
                reference, places[name] = reference or computed, (worker, variant)
            except (Failed, ValueError) as failed:
                not_run[name] = str(failed)
        if not reference:
            raise Failed(f"there is no reference: {not_run}")
    return rows, places, not_run


def time_rounds(rows, places, not_run, machine, rounds, patience):
    """Fill the rows' seconds, every variant once in each round; returns the machine's rate in each.

    A variant whose gradient took longer than `patience` is not run again; that was its time.  One that fails now
    loses its row.
    """
    rates = []
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        rates.append(machine.ask("rate"))
        for name in [name for name in rows if rows[name]["timed"]]:
            try:
                _time(rows[name], *places[name], patience)
            except Failed as failed:
                not_run[name] = str(failed)
                del rows[name]
    return rates


def _time(row, worker, variant, patience):
    if row["first_seconds"] > patience:
        row["seconds"] = [row["first_seconds"]]
    else:
        worker.ask("step", variant)
        row["seconds"].append(worker.seconds)
