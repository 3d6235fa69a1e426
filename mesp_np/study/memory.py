"""Peak memory by method: exact plans of every model, length, rank and loss; the 0.5B ones also run.

A run needs weights, and its bytes do not depend on what they hold, so they are zeros.
"""

import numpy as np

from mesp_np.batch import Batch
from mesp_np.config import PRESETS, RunConfig
from mesp_np.engine import Engine, plan_step
from mesp_np.methods import METHODS
from mesp_np.params import phantom_weights
from mesp_np.study import Section, Table, charts, published

PARTS = {"trainables": ("adapter", "weight"), "gradients": ("grad",), "optimizer": ("optimizer",),
         "checkpoints": ("checkpoint",), "block": ("kept", "temp", "input", "weight_tile"), "loss": ("logits",)}
MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b")
SEQS, RANKS, LOSSES = (128, 256, 512, 1024, 2048, 4096), (4, 8, 16, 32), ("vocab:1024", "full")
RUN = {"model": "qwen2.5-0.5b", "seq": 256, "rank": 8, "loss": "vocab:1024"}     # what is really run, by each method
MB = 10 ** 6


def measure(settings, progress):
    """A row for each cell: its plan, and for RUN what a real step took."""
    return {"rows": [_row(cell, progress) for cell in cells(settings)]}


def cells(settings):
    """Every combination that is planned: all lengths at rank 8, and all ranks at length 256."""
    models, seqs, ranks = (settings.get(name, default) for name, default in (
        ("models", MODELS), ("seqs", SEQS), ("ranks", RANKS)))
    for model in models:
        for seq, rank in dict.fromkeys([(seq, 8) for seq in seqs] + [(256, rank) for rank in ranks]):
            for loss in LOSSES:
                for method in METHODS:
                    yield {"model": model, "seq": seq, "rank": rank, "loss": loss, "method": method}


def run_config(cell, **changes):
    """RunConfig of a cell: batch 1, SGD, update after the backward, one row tile of 256 at most."""
    return RunConfig(method=cell["method"], seq=cell["seq"], rank=cell["rank"], loss=cell["loss"], batch_size=1,
                     optimizer="sgd", threads=2, **changes)


def _row(cell, progress):
    progress(" ".join(map(str, cell.values())))
    config, run = PRESETS[cell["model"]], run_config(cell)
    plan = plan_step(config, run)
    categories = plan.ledger.category_bytes_at_peak()
    row = cell | {"live_peak_bytes": plan.live_peak_bytes, "extent_bytes": plan.extent_bytes,
                  "parts": {part: sum(categories.get(name, 0) for name in names) for part, names in PARTS.items()},
                  "stages": plan.ledger.stage_peak_bytes(), "flops": dict(plan.flops),
                  "published_mb": published.peak(cell["model"], cell["seq"], cell["rank"], cell["method"])}
    if all(cell[name] == value for name, value in RUN.items()):
        row["run_live_peak_bytes"], row["run_extent_bytes"] = _really(config, run, plan.extent_bytes)
    return row


def _really(config, run, extent):
    """(live peak, extent) of a real step."""
    weights = {name: np.zeros(stored.shape, stored.dtype) for name, stored in phantom_weights(config).items()}
    ids = np.zeros((1, run.seq), np.int32)
    with Engine(config, weights, run, extent) as engine:
        engine.step([Batch.of(ids, ids)], 1e-4)
        return engine.arena.ledger.live_peak, engine.arena.extent


def tables(data):
    """Peaks by length, by rank, the parts of a peak, and plans beside runs."""
    rows = data["rows"]
    return [
        Table("peaks", "Live peak, MB (10^6 bytes), and the reported footprint",
              ("model", "seq", "rank", "loss", "method", "live peak", "extent", "reported"),
              [(*_key(row), row["live_peak_bytes"] / MB, row["extent_bytes"] / MB, row["published_mb"])
               for row in rows]),
        Table("parts", "The peak's parts, bytes", ("model", "seq", "rank", "loss", "method", *PARTS),
              [(*_key(row), *(row["parts"][part] for part in PARTS)) for row in rows]),
        Table("runs", "Plans beside real steps, bytes", ("method", "planned", "run", "planned extent", "run's extent"),
              [(row["method"], row["live_peak_bytes"], row["run_live_peak_bytes"], row["extent_bytes"],
                row["run_extent_bytes"]) for row in rows if "run_extent_bytes" in row])]


def _key(row):
    return tuple(row[name] for name in ("model", "seq", "rank", "loss", "method"))


def figures(data):
    """The peak over the length, and what it is made of."""
    rows = data["rows"]
    return {
        "Live peak of Qwen2.5-0.5B over the length, rank 8, logits by tiles of the vocabulary; crosses are reported "
        "footprints of processes": lambda figure: _by_length(figure, rows),
        "What the peak is made of, at 256 tokens: logits by tiles, and whole": lambda figure: _by_part(figure, rows)}


def _by_length(figure, rows):
    axes = figure.subplots()
    for method, color in charts.METHODS.items():
        found = [row for row in rows if row["method"] == method and row["rank"] == RUN["rank"]
                 and row["model"] == RUN["model"] and row["loss"] == RUN["loss"]]
        axes.plot([row["seq"] for row in found], [row["live_peak_bytes"] / MB for row in found], "o-", color=color,
                  markersize=3, label=method)
        told = [row for row in found if row["published_mb"]]
        axes.plot([row["seq"] for row in told], [row["published_mb"] for row in told], "x", color=color)
    seqs = sorted({row["seq"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MB")
    axes.set_xticks(seqs, map(str, seqs))
    axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _by_part(figure, rows):
    for axes, loss in zip(figure.subplots(1, len(LOSSES), sharey=True), LOSSES, strict=True):
        found = [row for row in rows if all(row[name] == RUN[name] for name in ("model", "seq", "rank"))
                 and row["loss"] == loss]
        below = np.zeros(len(found))
        for part, color in charts.PARTS.items():
            heights = np.array([row["parts"][part] for row in found]) / MB
            axes.bar([row["method"] for row in found], heights, bottom=below, color=color, label=part)
            below += heights
        axes.set(title=loss)
        axes.tick_params("x", rotation=60)
    figure.axes[0].set_ylabel("MB at the peak")
    figure.axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))


def text(data):
    """What stands out."""
    cell = {row["method"]: row for row in data["rows"] if all(row[name] == RUN[name] for name in RUN if name in row)}
    ran = [row for row in data["rows"] if "run_extent_bytes" in row]
    equal = sum(row["live_peak_bytes"] == row["run_live_peak_bytes"] and row["extent_bytes"] == row["run_extent_bytes"]
                for row in ran)
    if not cell:
        return []
    lean, mesp, mebp = (cell[name]["live_peak_bytes"] / MB for name in ("mesp-lean", "mesp", "mebp"))
    return [f"At the papers' setting (Qwen2.5-0.5B, 256 tokens, rank 8) MeBP takes {mebp:.1f} MB, MeSP {mesp:.1f} and "
            f"mesp-lean {lean:.1f}, adapters and gradients included. The reported footprints, 360.8 and 136.2, are "
            "of whole processes: they hold weights, the interpreter's and the allocator's caches, and logits, which "
            "for this vocabulary are 74 MiB a copy in bfloat16.",
            f"{equal} of {len(ran)} methods that were really run took the bytes of their plans, to the last one."]


SECTION = Section("memory", "Peak memory by method", measure, tables, figures, text)
