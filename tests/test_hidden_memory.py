"""Nothing large is allocated outside the arena during a step.

NumPy and Numba register array data with tracemalloc.  The step is watched from op to op:
within each op, and in the code between two ops, the traced memory may rise by no more than
LIMIT above where it began.  (Watched as a whole, a step would also show the ledger's own
list, a few hundred bytes of Python objects an event.)
"""

import tracemalloc

import pytest

from tests import small

LIMIT = 64 * 1024


def hidden_peak(engine, action):
    """The largest rise of traced memory within one op, or between two, while `action` runs."""
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
    finally:
        engine.team.run = plain
        tracemalloc.stop()
    return max(rises)


@pytest.mark.parametrize("method", [*small.EXACT, "mezo"])
@pytest.mark.parametrize("changes", [dict(loss="rows:64"), dict(loss="vocab:500"), dict(optimizer="adamw", clip=1.0),
                                     dict(trainable="full"), dict(threads=2)], ids=str)
def test_step(method, changes):
    config = small.model_config(vocab_size=2000, hidden_size=192, head_dim=32, intermediate_size=500)
    with small.engine(config, stored="bf16", method=method, batch_size=2, seq=150, **changes) as engine:
        batch = small.batch(config, 2, 150)
        engine.step([batch], rate=1e-3)                      # compile first
        assert hidden_peak(engine, lambda: engine.step([batch], rate=1e-3)) < LIMIT


def test_the_guard_sees_a_hidden_temporary(monkeypatch):
    """Negative control: a product that makes a whole array outside the arena is caught."""
    from mesp_np.ops import residual

    def wasteful(team, out, x):
        if out.flags.writeable:
            out[:] = out + x

    config = small.model_config(hidden_size=192, head_dim=32)
    with small.engine(config, batch_size=2, seq=150) as engine:
        batch = small.batch(config, 2, 150)
        monkeypatch.setattr(residual, "forward", wasteful)
        engine.step([batch], rate=1e-3)
        assert hidden_peak(engine, lambda: engine.step([batch], rate=1e-3)) > LIMIT
