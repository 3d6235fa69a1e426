"""Time: planned FLOPs and measured seconds of a step by each method, in turns, on one real model."""

from statistics import median

import numpy as np

from mesp_np.batch import Batch
from mesp_np.checkpoint.folder import default_folder, load
from mesp_np.compare import compare
from mesp_np.config import RunConfig
from mesp_np.methods import METHODS
from mesp_np.study import Section, Table, charts

ROUNDS, SEQ = 7, 256
PHASES = ("forward", "recompute", "backward", "update")
GIGA = 10 ** 9


def measure(settings, progress):
    """For each method: FLOPs by phase, and the seconds of ROUNDS steps."""
    folder = settings.get("folder") or default_folder()
    checkpoint, seq = load(folder), settings.get("seq", SEQ)
    runs = [RunConfig(method=method, batch_size=1, seq=seq, optimizer="sgd", threads=2) for method in METHODS]
    batch = Batch.of(*np.random.default_rng(0).integers(0, checkpoint.config.vocab_size, (2, 1, seq)))
    made = compare(checkpoint.config, checkpoint.weights, runs, batch, settings.get("rounds", ROUNDS), progress)
    return {"model": checkpoint.name, "seq": seq, "methods": {one.name: {
        "flops": {phase: one.engine.team.flops.get(phase, 0) for phase in PHASES}, "seconds": list(one.seconds)}
        for one in made}}


def tables(data):
    """A line a method."""
    return [Table("time", f"A step of {data['model']}, 1 x {data['seq']} tokens: GFLOP by phase, and seconds",
                  ("method", *PHASES, "seconds", "least", "most", "GFLOP/s"), [
                      (name, *(one["flops"][phase] / GIGA for phase in PHASES), median(one["seconds"]),
                       min(one["seconds"]), max(one["seconds"]), _flops(one) / GIGA / median(one["seconds"]))
                      for name, one in _in_order(data)])]


def figures(data):
    """FLOPs and seconds, each as multiples of store's."""
    return {f"Work and time of a step of {data['model']}, as multiples of plain backpropagation's":
            lambda figure: _bars(figure, data)}


def text(data):
    """What recomputing costs in both."""
    stored, again = (data["methods"][name] for name in ("store-lean", "mesp-lean"))
    work, time = _flops(again) / _flops(stored), median(again["seconds"]) / median(stored["seconds"])
    return [f"Forming the blocks again (mesp-lean against store-lean) takes {100 * (work - 1):.0f} % more FLOPs and "
            f"{100 * (time - 1):.0f} % more seconds on this machine."]


def _bars(figure, data):
    axes, rows = figure.subplots(), _in_order(data)
    base = data["methods"]["store"]
    for shift, (label, color, value) in enumerate((
            ("FLOPs", "#9fc6e0", _flops), ("seconds", "#c1440e", lambda one: median(one["seconds"])))):
        places, heights = zip(*((at + 0.4 * shift - 0.2, value(one) / value(base)) for at, (_, one) in enumerate(rows)),
                              strict=True)
        axes.bar(places, heights, 0.4, color=color, label=label)
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_xticks(range(len(rows)), [name for name, _ in rows])
    axes.legend()


def _flops(one):
    return sum(one["flops"].values())


def _in_order(data):
    return [(name, data["methods"][name]) for name in charts.METHODS if name in data["methods"]]


SECTION = Section("time", "Time", measure, tables, figures, text)
