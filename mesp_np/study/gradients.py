"""How good MeZO's gradient is: its estimates beside the exact gradient, over many draws of its noise.

An estimate from n probes is (1/n) sum_j c_j z_j with z ~ N(0, I) in d dimensions and c_j near g . z_j, so that to first
order, whatever the model:

    cosine           mean sqrt(2 / (pi d)) for one probe; `compare.theory_cosine` for n
    relative error   |estimate - g| / |g|, root mean square sqrt((d + 1) / n)
    signs            a part 1/2 + mean_i arcsin(|g_i| / |g|) / pi of them agrees, for one probe

Of a part of the gradient, as one layer's with d_l dimensions, the cosine has a random sign: its mean over draws
is sqrt(2 / (pi d_l)) |g_l| / |g|, that of its magnitude sqrt(2 / (pi d_l)); both are told.

Source    MeZO, arXiv 2305.17333; MeSP, arXiv 2602.13069, which reports a cosine of about 0.001.
"""

import math
import re
from dataclasses import replace

import numpy as np

from mesp_np.batch import Batch
from mesp_np.checkpoint.folder import default_folder, load
from mesp_np.compare import theory_cosine
from mesp_np.config import RunConfig
from mesp_np.engine import Engine, plan_step
from mesp_np.study import Section, Table

DRAWS, PROBES, EPSILONS = 64, (1, 4, 16), (1e-2, 1e-3, 1e-4)
TRAINED, SEQ, RATE = 40, 64, 1e-2        # steps of training before the second measurement, at a batch of so many tokens
LAYER = re.compile(r"layers\.(\d+)\.")
WHEN = ("before", "after")


def measure(settings, progress):
    """Rows of means over draws: one for every moment, number of probes and eps; and by layer, for one probe."""
    checkpoint = load(settings.get("folder") or default_folder())
    draws, seq = settings.get("draws", DRAWS), settings.get("gradient_seq", SEQ)
    rng = np.random.default_rng(0)
    batch = Batch.of(*rng.integers(0, checkpoint.config.vocab_size, (2, 1, seq)))
    run = RunConfig(method="mesp-lean", batch_size=1, seq=seq, optimizer="sgd", threads=2, loss="vocab:1024")
    rows, layers = [], []
    with _engine(checkpoint, run) as exact:
        for when in WHEN:
            gradient = exact.gradients(batch)
            for probes, eps in [(1, eps) for eps in EPSILONS] + [(probes, EPSILONS[1]) for probes in PROBES[1:]]:
                progress(f"{when} training, {probes} probes, eps {eps:g}")
                mezo = replace(run, method="mezo", probes=probes, mezo_eps=eps)
                found = _draws(checkpoint, mezo, batch, exact, draws)
                rows.append({"when": when, "probes": probes, "eps": eps, "draws": draws} |
                            _means(found, gradient, probes))
                if (probes, eps) == (1, EPSILONS[1]):
                    layers += [{"when": when, "layer": layer} | means for layer, means in _by_layer(found, gradient)]
            for _ in range(settings.get("trained", TRAINED) if when == WHEN[0] else 0):
                exact.step([batch], RATE)
    return {"model": checkpoint.name, "seq": seq, "rows": rows, "layers": layers}


def _engine(checkpoint, run):
    plan = plan_step(checkpoint.config, run, weights=checkpoint.weights)
    return Engine(checkpoint.config, checkpoint.weights, run, plan.extent_bytes)


def _draws(checkpoint, run, batch, exact, draws):
    """That many estimates of the gradient at the adapters that `exact` has: a list of name -> array."""
    with _engine(checkpoint, run) as engine:
        for mine, its in zip(engine.parameters, exact.parameters, strict=True):
            mine.value[...] = its.value
        found = []
        for draw in range(draws):
            engine.steps = draw                            # the noise is that of another step each time
            found.append(engine.gradients(batch))
        return found


def _flat(gradient):
    return np.concatenate([array.ravel().astype(np.float64) for array in gradient.values()])


def _cosine(a, b):
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) if a.any() and b.any() else 0.0


def _means(found, gradient, probes):
    """Means over draws of what the whole estimate has in common with the gradient, and what theory says."""
    g = _flat(gradient)
    size, estimates = np.linalg.norm(g), [_flat(one) for one in found]
    signs = 0.5 + float(np.mean(np.arcsin(np.minimum(np.abs(g) / size, 1)))) / math.pi
    return {"dimensions": g.size, "cosine": float(np.mean([_cosine(one, g) for one in estimates])),
            "cosine_theory": theory_cosine(g.size, probes),
            "signs_agree": float(np.mean([np.mean(np.sign(one[g != 0]) == np.sign(g[g != 0])) for one in estimates])),
            "signs_theory": signs if probes == 1 else None,
            "relative_error": float(np.sqrt(np.mean([np.sum((one - g) ** 2) for one in estimates])) / size),
            "relative_error_theory": math.sqrt((g.size + 1) / probes)}


def _by_layer(found, gradient):
    """(layer, signed mean and mean magnitude of its cosine, and its theory), from estimates with one probe."""
    whole = np.linalg.norm(_flat(gradient))
    names = {}
    for name in gradient:
        names.setdefault(int(LAYER.search(name)[1]), []).append(name)
    for layer, own in sorted(names.items()):
        g = _flat({name: gradient[name] for name in own})
        cosines = [_cosine(_flat({name: one[name] for name in own}), g) for one in found]
        part, magnitude = float(np.linalg.norm(g) / whole), math.sqrt(2 / (math.pi * g.size))
        yield layer, {"dimensions": g.size, "part_of_gradient": part, "signed_mean": float(np.mean(cosines)),
                      "signed_theory": magnitude * part, "mean_magnitude": float(np.mean(np.abs(cosines))),
                      "magnitude_theory": magnitude}


def tables(data):
    """The whole, and by layer."""
    columns = ("when", "probes", "eps", "draws", "dimensions", "cosine", "cosine_theory", "signs_agree", "signs_theory",
               "relative_error", "relative_error_theory")
    own = ("when", "layer", "dimensions", "part_of_gradient", "signed_mean", "signed_theory", "mean_magnitude",
           "magnitude_theory")
    return [Table("estimates", f"MeZO's estimates beside the gradient of {data['model']}: means over draws", columns,
                  [tuple(row[name] for name in columns) for row in data["rows"]]),
            Table("layers", "By layer, one probe: the cosine's signed mean, and the mean of its magnitude", own,
                  [tuple(row[name] for name in own) for row in data["layers"]])]


def figures(data):
    """The cosine over the number of probes, beside the theory's."""
    return {f"Cosine of MeZO's estimate with the gradient of {data['model']}, and the theory's line":
            lambda figure: _by_probes(figure, data["rows"])}


def _by_probes(figure, rows):
    axes = figure.subplots()
    for when, color in zip(WHEN, ("#1b4965", "#c1440e"), strict=True):
        found = sorted((row for row in rows if row["when"] == when and row["eps"] == EPSILONS[1]),
                       key=lambda row: row["probes"])
        axes.plot([row["probes"] for row in found], [row["cosine"] for row in found], "o", color=color,
                  label=f"{when} training")
    axes.plot([row["probes"] for row in found], [row["cosine_theory"] for row in found], "-", color="#444444",
              linewidth=0.8, label="theory")
    axes.set(xscale="log", yscale="log", xlabel="probes", ylabel="mean cosine")
    axes.set_xticks([row["probes"] for row in found], [str(row["probes"]) for row in found])
    axes.minorticks_off()
    axes.legend()


def text(data):
    """The cosine, and that it is a matter of dimension."""
    one = next(row for row in data["rows"] if row["probes"] == 1 and row["eps"] == EPSILONS[1])
    return [f"In {one['dimensions']:,} dimensions one probe's cosine is {one['cosine']:.2e} on average, where theory "
            f"says {one['cosine_theory']:.2e}: it depends on how many numbers are trained and on nothing else of the "
            f"model. At the 4,399,104 of Qwen2.5-0.5B it is {theory_cosine(4_399_104):.1e}; the 0.001 that was "
            "reported is of that order."]


SECTION = Section("gradients", "Gradient quality of MeZO", measure, tables, figures, text)
