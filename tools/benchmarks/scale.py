"""How bytes and seconds of this engine grow with the length of a row."""

import sys
from contextlib import ExitStack
from dataclasses import asdict, replace

from benchmarks import inputs
from benchmarks.measure import start


def measure(system, common, run, lengths, rounds, scratch):
    """`T=256` -> row of the system's first variant, for each length.

    A process each, so that the next finds the memory free.
    """
    rows, variant = {}, system.variants[0]
    for seq in lengths:
        print(f"T={seq}", file=sys.stderr)
        longer = replace(run, seq=seq)
        spec = common | {"run": asdict(longer), "tokens": inputs.tokens(common["config"]["vocab_size"], longer)}
        with ExitStack() as stack:
            worker = start(replace(system, variants=(variant,)), spec, scratch, stack)
            _step(worker, variant)                                    # the weights' pages are there from then on
            row = worker.about[variant] | worker.ask("memory", variant)
            rows[f"T={seq}"] = row | {"seconds": [_step(worker, variant) for _ in range(rounds)]}
    return rows


def _step(worker, variant):
    worker.ask("step", variant)
    return worker.seconds
