"""Methods side by side on one batch: bytes from the ledger, bits of the gradients, seconds.

Every method gets an engine of its own with the same seed, so the same adapters.  The reference
for bits, directions and errors is the first exact method, its products in full and its checkpoints
as they are.  Time is the median of several steps, taken in turn so that a slow moment of the machine
meets all methods.

Beside the extent stands what the operating system counts: how much anonymous memory the process
has more after an engine's first step than before the engine was there.  A step of another engine
went before, so that the kernels are there; what the growth has beyond the extent are lists of events
and other objects of Python: within 3 % and 4 MiB in all.
"""

import math
import re
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from mesp_np.engine import Engine, plan_step
from mesp_np.ledger import peak_difference
from mesp_np.methods import METHODS
from mesp_np.ops.noise import add_noise, key
from mesp_np.process import memory, trim, weight_pages

LAYER = re.compile(r"^(model\.)?layers?\.\d+\.")


@dataclass
class Contender:
    """One method's engine and what was measured on it.

    planned_...               what the plan of a step said
    os_growth_bytes           growth of anonymous memory with the engine and its first step
    resident_bytes            the whole process after that step, without the engines of other contenders
    weight_resident_bytes     pages of mapped weight files within that; None where the system does not tell
    gradient_relative_error   length of the difference to the reference's gradient, over the reference's length
    """

    name: str
    engine: object
    planned_live_peak_bytes: int
    planned_category_bytes_at_peak: dict
    recomputed_flops: int
    os_growth_bytes: int
    resident_bytes: int
    weight_resident_bytes: int | None
    gradient_bits_different: int = 0
    gradient_cosine: float = 1.0
    gradient_relative_error: float = 0.0
    seconds: tuple = ()

    @property
    def ledger(self):
        """That of the engine's last step."""
        return self.engine.arena.ledger


def compare(config, weights, runs, batch, rounds=3, progress=lambda text: None):
    """List of Contender, one for each RunConfig of `runs`, in their order.

    batch   model.Batch
    rounds  timed steps of each method
    """
    first, exact = next(filter(is_exact, runs), runs[0]), reference_run(runs)
    with ExitStack() as engines:
        progress(f"a first step, by {first.method}")
        with ExitStack() as warm_up:
            _measure(config, weights, first, batch, warm_up)
        trim()
        contenders = []
        for run in runs:
            progress(f"a step by {run.method}")
            contenders.append(_measure(config, weights, run, batch, engines, contenders))
        progress(f"the reference's gradient, by {exact.method}")
        with ExitStack() as own:
            found = [one for one in contenders if one.engine.run == exact]
            one = found[0] if found else _measure(config, weights, exact, batch, own)
            reference = one.engine.gradients(batch)
        for one in contenders:
            progress(f"gradients by {one.name}")
            _against(one, one.engine.gradients(batch), reference)
        for turn in range(rounds):
            for one in contenders:
                progress(f"round {turn + 1} of {rounds}, {one.name}")
                began = time.perf_counter()
                one.engine.step([batch], rate=1e-6)
                one.seconds += (time.perf_counter() - began,)
        return contenders


def is_exact(run):
    """Whether the run's method gives the gradient itself and no estimate."""
    return METHODS[run.method].exact


def reference_run(runs):
    """The RunConfig whose gradient the others are held against: exact, and nothing in it is rounded."""
    exact = next(filter(is_exact, runs), replace(runs[0], method="mesp-lean"))
    return replace(exact, compute="full", checkpoint_store="ram")


def describe(contenders, baseline):
    """{method: values} under the names of --json; savings are against the method named `baseline`."""
    base = next(one for one in contenders if one.name == baseline)
    return {one.name: {
        "live_peak_bytes": one.ledger.live_peak, "planned_live_peak_bytes": one.planned_live_peak_bytes,
        "extent_bytes": one.engine.arena.extent, "stage_peak_bytes": one.ledger.stage_peak_bytes(),
        "category_bytes_at_peak": one.ledger.category_bytes_at_peak(),
        "planned_category_bytes_at_peak": one.planned_category_bytes_at_peak,
        "saved_bytes": base.ledger.live_peak - one.ledger.live_peak,
        "differs_in": names_that_differ(one.ledger, base.ledger),
        "seconds_per_step": statistics.median(one.seconds) if one.seconds else None,
        "recomputed_flops": one.recomputed_flops,
        "gradient_bits_different": one.gradient_bits_different, "gradient_cosine": one.gradient_cosine,
        "gradient_relative_error": one.gradient_relative_error, "os_growth_bytes": one.os_growth_bytes,
        "resident_bytes": one.resident_bytes, "weight_resident_bytes": one.weight_resident_bytes}
        for one in contenders}


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


def _measure(config, weights, run, batch, engines, alive=()):
    """The Contender of a run after a first step, which moves nothing; `alive` are those whose engines are there too."""
    plan = plan_step(config, run, batch.ids.shape, weights)
    extent, planned = plan.extent_bytes, (plan.live_peak_bytes, plan.ledger.category_bytes_at_peak(),
                                          plan.flops.get("recompute", 0))
    del plan                                            # its events are megabytes
    before = memory().anonymous
    engine = engines.enter_context(Engine(config, weights, run, extent))
    _stir(engine)
    engine.step([batch], rate=0.0)
    now, others = memory(), sum(one.os_growth_bytes for one in alive)
    return Contender(run.method, engine, *planned, now.anonymous - before, now.resident - others,
                     weight_pages(weights.values()))


def _stir(engine):
    """Make B non-zero, so that no gradient is zero: with B = 0 that of A would be."""
    for index, p in enumerate(engine.parameters):
        if p.name.endswith("lora_B"):
            add_noise(engine.team, p.value, p.value, key(engine.run.seed, index), 0.02)


def _against(one, gradients, reference):
    """Bits, direction and error of one method's gradients against the reference's."""
    sums = np.zeros(4)
    for name, theirs in reference.items():
        one.gradient_bits_different += int(np.count_nonzero(_bits(gradients[name]) != _bits(theirs)))
        a, b = (array.ravel().astype(np.float64) for array in (gradients[name], theirs))
        sums += a @ b, a @ a, b @ b, (a - b) @ (a - b)
    both, own, length, error = sums
    one.gradient_cosine = float(both / math.sqrt(own * length))
    one.gradient_relative_error = math.sqrt(error / length)


def _bits(array):
    return array.view(f"u{array.dtype.itemsize}")
