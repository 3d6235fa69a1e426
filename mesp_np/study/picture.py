"""The step as a picture: live bytes over its events, by category, every method on one scale."""

from mesp_np.config import PRESETS
from mesp_np.engine import plan_step
from mesp_np.ledger import CATEGORIES, spans
from mesp_np.methods import METHODS
from mesp_np.study import Section, Table, memory

POINTS, NAMED = 400, 5                   # in a curve; tensors that are named at the peak
COLORS = {"adapter": "#1b4965", "weight": "#14344a", "grad": "#5fa8d3", "optimizer": "#9fc6e0", "checkpoint": "#e0a458",
          "kept": "#8f2d0c", "temp": "#c1440e", "logits": "#7a5195", "input": "#999999", "weight_tile": "#cccccc"}


def measure(settings, progress):
    """For each method: the composition of live bytes over the step, its stages, and the tensors at the peak."""
    model, seq = settings.get("model", memory.RUN["model"]), settings.get("seq", memory.RUN["seq"])
    found = {}
    for method in METHODS:
        progress(f"{model} {method}")
        plan = plan_step(PRESETS[model], memory.run_config(memory.RUN | {"method": method, "seq": seq}))
        found[method] = curve(plan.ledger)
    return {"model": model, "seq": seq, "methods": found}


def curve(ledger, points=POINTS):
    """A ledger's events in `points` spans, each at its highest: bytes by category, and the stage; and the peak."""
    _, *compositions = ledger.compositions()
    highest = [max(span, key=lambda at: ledger.events[at].live) for span in spans(range(len(ledger.events)), points)]
    used = [name for name in CATEGORIES if any(compositions[at][name] for at in highest)]
    return {"events": highest, "stages": [ledger.events[at].stage for at in highest],
            "bytes": {name: [compositions[at][name] for at in highest] for name in used},
            "live_peak_bytes": ledger.live_peak, "peak_at": ledger.peak_at - 1,
            "peak_stage": ledger.events[ledger.peak_at - 1].stage,
            "at_peak": [[tensor.name, tensor.bytes] for tensor in ledger.at_peak()[:NAMED]]}


def tables(data):
    """The peaks, and the largest tensors in them."""
    return [Table("peak_tensors", "The largest tensors at each method's peak, bytes",
                  ("method", "peak", "tensor", "bytes"),
                  [(method, one["live_peak_bytes"], *tensor) for method, one in _in_order(data)
                   for tensor in one["at_peak"]])]


def _in_order(data):
    """(method, curve), as methods are listed elsewhere."""
    return [(method, data["methods"][method]) for method in METHODS if method in data["methods"]]


def figures(data):
    """One panel a method."""
    caption = (f"Live bytes over the events of a step of {data['model']} at {data['seq']} tokens, by category; lines "
               "part forward, loss, backward and update")
    return {caption: lambda figure: _panels(figure, _in_order(data))}


def _panels(figure, methods):
    panels = figure.subplots(2, -(-len(methods) // 2), sharey=True).ravel()
    found = {}                                         # category -> its patch, of whichever panel has it
    for axes, (method, one) in zip(panels, methods, strict=False):
        used = [name for name in CATEGORIES if name in one["bytes"]]
        axes.stackplot(one["events"], [[size / memory.MB for size in one["bytes"][name]] for name in used],
                       colors=[COLORS[name] for name in used], labels=used)
        for before, after, at in zip(one["stages"], one["stages"][1:], one["events"][1:], strict=False):
            if before != after:
                axes.axvline(at, color="black", linewidth=0.5)
        axes.set_title(f"{method} {one['live_peak_bytes'] / memory.MB:.1f} MB", fontsize=8)
        axes.set_xticks([])
        found |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        name, size = one["at_peak"][0]
        axes.annotate(f"{name.split('.', 2)[-1]}\n{size / memory.MB:.1f}", (one["peak_at"],
                      one["live_peak_bytes"] / memory.MB), fontsize=7, ha="center", va="bottom")
    panels[0].set_ylim(0, 1.2 * max(one["live_peak_bytes"] for _, one in methods) / memory.MB)
    for axes in panels[len(methods):]:
        axes.axis("off")
        axes.legend(found.values(), found, loc="center", fontsize=8)
    for axes in panels[::len(panels) // 2]:
        axes.set_ylabel("MB")


def text(data):
    """Where each peak is."""
    return [f"{method} is at its highest, {one['live_peak_bytes']:,} bytes, in the {one['peak_stage']}."
            for method, one in _in_order(data)]


SECTION = Section("picture", "The step as a picture", measure, tables, figures, text)
