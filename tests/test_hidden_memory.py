"""Nothing large is allocated outside the arena during a step, and nothing at all is left of it.

NumPy and Numba register array data with tracemalloc.  The step is watched from op to op:
within each op, and in the code between two ops, the traced memory may rise by no more than
LIMIT above where it began.  (Watched as a whole, a step would also show the ledger's own
list, a few hundred bytes of Python objects an event.)  After the step, NumPy's own domain
tells arrays from those objects: what is left there was hoarded.
"""

import tracemalloc

import numpy as np
import pytest

from mesp_np.ops import residual
from tests import small

LIMIT, LEFT = 64 * 1024, 1024
ARRAYS = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)


def hidden_bytes(engine, action):
    """(rise, left): the largest rise of traced memory within or between ops while `action` runs, and arrays after."""
    plain, rises = engine.team.run, []

    def mark():
        now, peak = tracemalloc.get_traced_memory()
        rises.append(peak - starts[-1])
        starts.append(now)
        tracemalloc.reset_peak()

    def watched(*args, **kwargs):
        mark()
        plain(*args, **kwargs)
        mark()

    tracemalloc.start()
    starts = [tracemalloc.get_traced_memory()[0]]
    engine.team.run = watched
    try:
        action()
        mark()
        left = tracemalloc.take_snapshot().filter_traces([ARRAYS])
    finally:
        engine.team.run = plain
        tracemalloc.stop()
    return max(rises), sum(trace.size for trace in left.traces)


@pytest.mark.parametrize("method", [*small.EXACT, "mezo"])
@pytest.mark.parametrize("changes", [dict(loss="rows:64"), dict(loss="vocab:500"), dict(optimizer="adamw", clip=1.0),
                                     dict(trainable="full"), dict(threads=2)], ids=str)
def test_step(method, changes):
    config = small.model_config(vocab_size=2000, hidden_size=192, head_dim=32, intermediate_size=500)
    with small.engine(config, stored="bf16", method=method, batch_size=2, seq=150, **changes) as engine:
        batch = small.batch(config, 2, 150)
        engine.step([batch], rate=1e-3)                      # compile first
        rise, left = hidden_bytes(engine, lambda: engine.step([batch], rate=1e-3))
    assert rise < LIMIT and left < LEFT


def residual_that(adds, monkeypatch):
    """What a step hides when the residual connection does its sum by `adds`."""
    config = small.model_config(hidden_size=192, head_dim=32)

    def forward(team, out, x):
        if out.flags.writeable:
            adds(out, x)

    with small.engine(config, batch_size=2, seq=150) as engine:
        batch = small.batch(config, 2, 150)
        monkeypatch.setattr(residual, "forward", forward)
        engine.step([batch], rate=1e-3)
        return hidden_bytes(engine, lambda: engine.step([batch], rate=1e-3))


def test_the_guard_sees_a_hidden_temporary(monkeypatch):
    """Negative control: a sum that makes a whole array outside the arena is caught."""
    def wasteful(out, x):
        out[:] = out + x

    rise, left = residual_that(wasteful, monkeypatch)
    assert rise > LIMIT and left < LEFT


def test_the_guard_sees_a_hoard(monkeypatch):
    """Negative control: 40 KiB kept from every residual is below LIMIT each time, and found after the step."""
    hoard = []

    def hoarding(out, x):
        np.add(out, x, out=out)
        hoard.append(np.empty(40 * 1024, np.uint8))

    rise, left = residual_that(hoarding, monkeypatch)
    assert rise < LIMIT and left >= 4 * 40 * 1024
