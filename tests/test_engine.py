"""What an engine refuses to compute, and windows of batches that differ in shape."""

import numpy as np
import pytest

from mesp_np.engine import Engine, plan_step
from mesp_np.errors import UserError
from mesp_np.methods import METHODS
from mesp_np.model import Batch
from tests import small


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
