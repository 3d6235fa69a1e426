"""Adapters on some of the layers: gradients reach them all, and nothing below them is kept."""

import numpy as np
import pytest

from mesp_np.engine import plan_step
from mesp_np.errors import UsageError
from tests import small

CONFIG = small.model_config(num_hidden_layers=4)
SETS = [(0,), (3,), (0, 2), (-1, -2), ()]


def gradients(layers, silent=(), **changes):
    """Gradients with adapters on `layers`, each with values of its own; those of `silent` layers are zero."""
    with small.engine(CONFIG, layers=layers, **changes) as engine:
        for p in engine.parameters:
            layer = int(p.name.split(".")[1])
            rng = np.random.default_rng([layer, *p.name.encode()])
            p.value[:] = (layer not in silent) * 0.2 * rng.standard_normal(p.value.shape)
        return engine.gradients(small.batch(CONFIG, 3, 13))


@pytest.mark.parametrize("layers", SETS, ids=str)
@pytest.mark.parametrize("method", small.EXACT)
def test_every_adapter_of_every_set_gets_the_same_bits_from_every_method(layers, method):
    found, stored = gradients(layers, method=method), gradients(layers, method="store")
    assert {int(name.split(".")[1]) for name in found} == {index % 4 for index in layers or range(4)}
    assert len(found) == 14 * len(layers or range(4))
    for name, grad in found.items():
        assert grad.any() and grad.tobytes() == stored[name].tobytes()


@pytest.mark.parametrize("layers", SETS[:-1], ids=str)
def test_an_absent_adapter_is_one_that_is_zero(layers):
    adapted = {index % 4 for index in layers}
    found = gradients(layers, dtype="float64")
    everywhere = gradients((), silent=set(range(4)) - adapted, dtype="float64")
    for name, grad in found.items():
        np.testing.assert_allclose(grad, everywhere[name], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("method", [*small.EXACT, "mezo"])
@pytest.mark.parametrize("layers", SETS, ids=str)
def test_plan_equals_run(layers, method):
    with small.engine(CONFIG, layers=layers, method=method) as engine:
        engine.step([small.batch(CONFIG, 3, 13)], rate=0.1)
        assert engine.arena.ledger.live_peak == engine.plan.live_peak_bytes
        assert len(engine.arena.ledger.events) == len(engine.plan.ledger.events)


@pytest.mark.parametrize("method", ["store", "mesp-lean"])
def test_nothing_below_the_lowest_adapter_is_kept_or_differentiated(method):
    whole, last = (plan_step(CONFIG, small.run_config(layers=layers, method=method)) for layers in ((), (3,)))
    assert last.live_peak_bytes < whole.live_peak_bytes
    assert last.flops["backward"] < whole.flops["backward"] / 2
    several = [plan_step(CONFIG, small.run_config(layers=layers, method=method)) for layers in ((2, 3), (1, 2, 3))]
    one, two, three = (plan.flops["backward"] for plan in (last, *several))
    assert three - two == two - one                                # a layer with layers below that are trained
    inputs, head = (2 * 39 * CONFIG.hidden_size * width for width in (
        CONFIG.query_width + 2 * CONFIG.key_width, CONFIG.vocab_size))
    assert one - head < two - one - inputs                         # one without: no gradient of what q, k, v read
    kept = {event.name for event in last.ledger.events if event.category in ("checkpoint", "kept")}
    assert kept and all(name.startswith("layer.3.") for name in kept)


def test_a_layer_that_the_model_has_not_is_refused():
    with pytest.raises(UsageError, match="--layers names 4, 7; the model has layers 0 to 3"):
        plan_step(CONFIG, small.run_config(layers=(1, 4, 7)))


def test_more_layers_from_the_back_than_there_are_is_all_of_them():
    assert small.run_config(layers=tuple(range(-9, 0))).adapted_layers(4) == {0, 1, 2, 3}
