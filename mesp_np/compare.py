"""Methods side by side on one batch: bytes from the ledger, bits of the gradients, seconds.

Every method gets an engine of its own with the same seed, so the same adapters.  The
first exact method is the reference for bits and directions; time is the median of several
steps, taken in turn so that a slow moment of the machine meets all methods.
"""

import math
import re
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import psutil

from mesp_np.engine import Engine, plan_step
from mesp_np.ledger import peak_difference
from mesp_np.methods import METHODS
from mesp_np.ops.noise import add_noise, key

LAYER = re.compile(r"^(model\.)?layers?\.\d+\.")


@dataclass
class Contender:
    """One method's engine and what was measured on it."""

    name: str
    plan: object
    engine: object
    os_growth_bytes: int = 0
    gradient_bits_different: int = 0
    gradient_cosine: float = 1.0
    ledger: object = None
    seconds: tuple = ()


def compare(config, weights, runs, batch, rounds=3, progress=lambda text: None):
    """List of Contender, one for each RunConfig of `runs`, in their order.

    batch   model.Batch
    rounds  timed steps of each method
    """
    exact = next((run for run in runs if METHODS[run.method].exact), replace(runs[0], method="mesp-lean"))
    with ExitStack() as engines:
        progress(f"the exact gradient, by {exact.method}")
        with ExitStack() as warm_up:             # kernels and BLAS buffers are then there for all, and in no growth
            _, reference = _measure(config, weights, exact, batch, warm_up)
        contenders = []
        for run in runs:
            progress(f"gradients by {run.method}")
            one, gradients = _measure(config, weights, run, batch, engines)
            _against(one, gradients, reference)
            contenders.append(one)
        for turn in range(rounds):
            for one in contenders:
                progress(f"round {turn + 1} of {rounds}, {one.name}")
                began = time.perf_counter()
                one.engine.step([batch], rate=1e-6)
                one.seconds += (time.perf_counter() - began,)
        return contenders


def describe(contenders, baseline):
    """{method: values} under the names of --json; savings are against the method named `baseline`."""
    base = next(one for one in contenders if one.name == baseline)
    return {one.name: {
        "live_peak_bytes": one.ledger.live_peak, "planned_live_peak_bytes": one.plan.live_peak_bytes,
        "extent_bytes": one.engine.arena.extent, "stage_peak_bytes": one.ledger.stage_peak_bytes(),
        "category_bytes_at_peak": one.ledger.category_bytes_at_peak(),
        "planned_category_bytes_at_peak": one.plan.ledger.category_bytes_at_peak(),
        "saved_bytes": base.ledger.live_peak - one.ledger.live_peak,
        "differs_in": names_that_differ(one.ledger, base.ledger),
        "seconds_per_step": statistics.median(one.seconds) if one.seconds else None,
        "recomputed_flops": one.plan.flops.get("recompute", 0),
        "gradient_bits_different": one.gradient_bits_different, "gradient_cosine": one.gradient_cosine,
        "os_growth_bytes": one.os_growth_bytes} for one in contenders}


def names_that_differ(ledger, base):
    """Tensor name, without its layer -> bytes at the base's peak minus bytes at this one's, largest first."""
    totals = {}
    for name, (here, there) in peak_difference(ledger, base).items():
        short = LAYER.sub("", name)
        totals[short] = totals.get(short, 0) + there - here
    return dict(sorted(((name, size) for name, size in totals.items() if size), key=lambda item: -abs(item[1])))


def theory_cosine(trainable, probes=1):
    """Mean |cos| of MeZO's estimate with the gradient in d dimensions, for n probes and n << d.

    g_hat has the component chi^2_n / n along g and a length near sqrt(d / n) |g| chi_n / sqrt(n), so
    the cosine is chi_n / sqrt(d), with mean sqrt(2 / d) Gamma((n+1)/2) / Gamma(n/2); sqrt(2 / (pi d)) for n = 1.
    """
    return math.sqrt(2 / trainable) * math.exp(math.lgamma((probes + 1) / 2) - math.lgamma(probes / 2))


def _measure(config, weights, run, batch, engines):
    """(Contender, its gradients), with the growth of the process over the engine's first step."""
    plan = plan_step(config, run, batch.ids.shape, weights)
    before = private_bytes()
    engine = engines.enter_context(Engine(config, weights, run, plan.extent_bytes))
    _stir(engine)
    one = Contender(run.method, plan, engine)
    gradients = engine.gradients(batch)
    engine.step([batch], rate=1e-6)
    one.ledger = engine.arena.ledger
    one.os_growth_bytes = private_bytes() - before - sum(g.nbytes for g in gradients.values())
    return one, gradients


def _stir(engine):
    """Make B non-zero, so that no gradient is zero: with B = 0 that of A would be."""
    for index, p in enumerate(engine.parameters):
        if p.name.endswith("lora_B"):
            add_noise(engine.team, p.value, p.value, key(engine.run.seed, index), 0.02)


def _against(one, gradients, reference):
    """Bits and direction of one method's gradients against the first's."""
    pairs = [(gradients[name].ravel(), reference[name].ravel()) for name in reference]
    one.gradient_bits_different = sum(int(np.count_nonzero(_bits(a) != _bits(b))) for a, b in pairs)
    dots = [sum(float(np.dot(x.astype(np.float64), y.astype(np.float64))) for x, y in sides)
            for sides in (pairs, [(a, a) for a, _ in pairs], [(b, b) for _, b in pairs])]
    one.gradient_cosine = dots[0] / math.sqrt(dots[1] * dots[2])


def _bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def private_bytes():
    """Resident bytes of this process that no file backs, as the operating system counts them."""
    info = psutil.Process().memory_info()
    return info.rss - getattr(info, "shared", 0)
