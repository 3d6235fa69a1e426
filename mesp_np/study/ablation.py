"""What h = x A^T is worth, stored or formed again; and which tensors make the difference between MeBP and MeSP.

The paper credits forming h again with 30.1 MB of the 3B model's footprint (its table 5).  Here both are
steps of one engine that differ in nothing else.
"""

from mesp_np.config import PRESETS
from mesp_np.engine import plan_step
from mesp_np.ledger import peak_difference
from mesp_np.study import Section, Table, charts, memory, published

METHODS = ("mebp", "mesp-store-h", "mesp", "mesp-lean")
SEQ, RANK = 256, 8


def measure(settings, progress):
    """For each model: peaks and FLOPs of METHODS, and the tensors at the peaks of MeBP and MeSP that differ."""
    found = {}
    for model in settings.get("models", memory.MODELS):
        plans = {}
        for method in METHODS:
            progress(f"{model} {method}")
            cell = {"method": method, "seq": SEQ, "rank": RANK, "loss": memory.RUN["loss"]}
            plans[method] = plan_step(PRESETS[model], memory.run_config(cell))
        found[model] = {
            "peaks": {method: plan.live_peak_bytes for method, plan in plans.items()},
            "recomputed_flops": {method: plan.flops.get("recompute", 0) for method, plan in plans.items()},
            "flops": {method: sum(plan.flops.values()) for method, plan in plans.items()},
            "h_bytes": _h_bytes(plans["mesp-store-h"].ledger),
            "tensors": {name: list(sizes) for name, sizes in
                        peak_difference(plans["mebp"].ledger, plans["mesp"].ledger).items()}}
    return {"models": found}


def _h_bytes(ledger):
    """Bytes of the seven h of one block."""
    kept = [event for event in ledger.events if event.verb == "alloc" and event.category == "kept"]
    sizes = {event.name: event.bytes for event in kept if event.name.startswith("layer.0.h")}
    return sum(sizes.values())


def tables(data):
    """By model; and by tensor."""
    models = data["models"].items()
    return [
        Table("h", "Storing h, against forming it again: live peak in bytes, GFLOP a step, and what was reported (MB)",
              ("model", "stored", "formed again", "saved", "seven h of a block", "GFLOP stored", "GFLOP formed again",
               "reported"),
              [(model, one["peaks"]["mesp-store-h"], one["peaks"]["mesp"], _saved(one), one["h_bytes"],
                one["flops"]["mesp-store-h"] / 1e9, one["flops"]["mesp"] / 1e9, _reported(model))
               for model, one in models]),
        Table("tensors", "What differs at the peaks of MeBP and MeSP, bytes", ("model", "tensor", "mebp", "mesp"),
              [(model, name, *sizes) for model, one in models
               for name, sizes in sorted(one["tensors"].items(), key=lambda item: item[1][1] - item[1][0])])]


def _saved(one):
    return one["peaks"]["mesp-store-h"] - one["peaks"]["mesp"]


def _reported(model):
    stored, again = (published.peak(model, SEQ, RANK, method) for method in ("mesp-store-h", "mesp"))
    return stored - again if stored else None


def figures(data):
    """The tensors that make the difference, of the smallest model."""
    model, one = next(iter(data["models"].items()))
    return {f"Tensors at the peaks of MeBP and MeSP that differ, {model}, MB": lambda figure: _bars(figure, one)}


def _bars(figure, one, most=14):
    axes = figure.subplots()
    ordered = sorted(one["tensors"].items(), key=lambda item: -abs(item[1][0] - item[1][1]))[:most][::-1]
    names = [name.split(".", 2)[-1] if name.startswith("layer.") else name for name, _ in ordered]
    for shift, method in enumerate(("mesp", "mebp")):
        axes.barh([at + 0.4 * shift - 0.2 for at in range(len(names))],
                  [sizes[method == "mesp"] / memory.MB for _, sizes in ordered], 0.4,
                  color=charts.METHODS[method], label=method)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="MB")
    axes.legend(loc="lower right")


def text(data):
    """The worth of h beside what was reported."""
    paragraphs = []
    for model, one in data["models"].items():
        saved, reported = _saved(one), _reported(model)
        more = one["flops"]["mesp"] / one["flops"]["mesp-store-h"] - 1
        words = (f"{model}: forming h again saves {saved:,} bytes of {one['peaks']['mesp-store-h']:,}, where the seven "
                 f"h of a block are {one['h_bytes']:,}, and costs {100 * more:.1f} % more FLOPs.")
        paragraphs.append(words + (f" Reported were {reported:.1f} MB." if reported else ""))
    return paragraphs


SECTION = Section("ablation", "What h is worth", measure, tables, figures, text)
