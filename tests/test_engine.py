"""What an engine refuses to compute, and windows of batches that differ in shape."""

import threading
import tracemalloc

import numpy as np
import pytest

from mesp_np.batch import Batch
from mesp_np.engine import Engine, plan_step
from mesp_np.errors import UserError
from mesp_np.methods import METHODS
from tests import op_checks, small


@pytest.mark.parametrize("ids, labels, words", [
    ([[1, 83]], [[1, 2]], "ids hold 1 to 83"), ([[-1, 5]], [[1, 2]], "ids hold -1 to 5"),
    ([[1, 2]], [[-100, 83]], "labels hold 83 to 83"), ([[1, 2]], [[-1, 2]], "labels hold -1 to 2"),
    ([[1, 2]], [[-100, -100]], "every label is -100"), ([[1] * 14], [[1] * 14], "T at most 13"),
    ([[1, 2]], [[1, 2, 3]], "all must be"), ([1, 2], [1, 2], "all must be")])
def test_a_batch_that_does_not_fit_is_refused(ids, labels, words):
    """One line, from each way in and anywhere in a window; and the engine goes on as if nothing had been."""
    with small.engine() as engine, small.engine() as other:
        good, bad = small.batch(engine.config, 3, 13), Batch.of(ids, labels)
        for action in (lambda: engine.loss(bad), lambda: engine.gradients(bad), lambda: engine.step([bad], rate=0.1),
                       lambda: engine.step([good, bad], rate=0.1)):
            with pytest.raises(UserError, match=words):
                action()
        assert engine.step([good], rate=0.1) == other.step([good], rate=0.1) and engine.steps == 1


def test_nothing_is_left_of_an_engine_that_cannot_be_made():
    before = threading.active_count()
    with pytest.raises(UserError, match="--layers names 9"):
        plan_step(small.model_config(), small.run_config(layers=(9,), threads=3))
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and threading.active_count() > before:
            thread.join(timeout=10)
    assert threading.active_count() == before


@pytest.mark.parametrize("changes, shape", [(dict(rank=100), (3, 13)), (dict(trainable="full"), (20, 13))], ids=str)
def test_products_may_be_deeper_than_the_model_is_wide(changes, shape):
    """The rank, or the rows of a batch, can be the axis that is summed."""
    config, run = small.model_config(), small.run_config(row_tile=1024, **changes)
    plan = plan_step(config, run, shape)
    with Engine(config, small.weights(config), run, plan.extent_bytes) as engine:
        engine.step([small.batch(config, *shape)], rate=0.1)
        assert engine.arena.ledger.live_peak == plan.live_peak_bytes


@pytest.mark.parametrize("method", METHODS)
def test_windows_of_mixed_shapes_fit_in_the_largest_plan(method):
    """GIVEN an arena of the largest plan of the shapes WHEN windows mix them THEN every step fits."""
    config, shapes = small.model_config(), [(3, 13), (1, 13), (3, 5), (2, 9), (3, 2), (1, 1)]
    run, weights = small.run_config(method=method, grad_accumulation=4), small.weights(config)
    capacity = max(plan_step(config, run, shape, weights).extent_bytes for shape in shapes)
    rng = np.random.default_rng(0)
    with Engine(config, weights, run, capacity, poison=True) as engine:
        for _ in range(5):
            window = [small.batch(config, *shapes[i], seed=int(i)) for i in rng.integers(0, len(shapes), 4)]
            assert np.isfinite(engine.step(window, rate=1e-3).loss)


@pytest.mark.parametrize("kind", [np.uint16, np.int64, np.uint8, list])
def test_whole_numbers_of_any_kind_are_the_same_batch(kind):
    ids, labels = [[1, 2, 3]], [[2, 3, 4]]
    with small.engine() as engine:
        expected = engine.evaluate(Batch.of(np.array(ids, np.int32), np.array(labels, np.int32)))
        cast = (lambda rows: rows) if kind is list else (lambda rows: np.array(rows, kind))
        assert engine.evaluate(Batch.of(cast(ids), cast(labels))) == expected


@pytest.mark.parametrize("ids", [[[1.0, 2.0]], [[1, 1 << 32]], [[True, False]]], ids=str)
def test_other_numbers_are_refused(ids):
    with pytest.raises(UserError, match="give whole numbers of 32 bits"):
        Batch.of(ids, [[1, 2]])


def test_checking_a_large_batch_allocates_little():
    ids = np.ones((4, 8192), np.int32)
    batch = Batch.of(ids, ids)
    tracemalloc.start()
    try:
        batch.check(83, 8192)
        assert tracemalloc.get_traced_memory()[1] < op_checks.HIDDEN_BYTES
    finally:
        tracemalloc.stop()


def undeclared(engine):
    """Names of arrays whose dtype is neither the run's nor that of ids and of sums."""
    declared = {"ids": "int32", "labels": "int32", "starts": "int32", "rows": "int32", "targets": "int32",
                "hits": "int32", "loss": "float64", "squares": "float64"}
    events = engine.setup_events + engine.arena.ledger.events
    return {event.name for event in events if event.dtype != declared.get(event.name, engine.run.dtype)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("changes", [dict(), dict(trainable="full", loss="vocab:10"), dict(dtype="float64")], ids=str)
def test_every_array_of_every_phase_has_the_dtype_of_the_run(method, changes):
    with small.engine(stored="bf16", method=method, optimizer="adamw", clip=1.0, dropout=0.1, **changes) as engine:
        engine.step([small.batch(engine.config, 3, 13)], rate=0.1)
        stages = {event.stage for event in engine.arena.ledger.events}
        assert stages == {"forward", "loss", "update"} | ({"backward"} if method != "mezo" else set())
        assert undeclared(engine) == set()
        other = "float32" if engine.run.dtype == "float64" else "float64"
        with engine.arena.temp("stray", (3,), other):
            assert undeclared(engine) == {"stray"}
