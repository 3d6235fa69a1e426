"""Frozen weights mapped or widened, in every stored form: the same bits, and the bytes where they belong.

The forms of a checkpoint (bf16, f16, f32, codes) compute in the run's dtype, so what overflows in
16 bits does not overflow here.
"""

import json

import numpy as np
import pytest

from mesp_np.checkpoint import folder
from mesp_np.cli import main
from mesp_np.ops.quant import round_bf16
from mesp_np.params import frozen_bytes
from tests import quantised, small, tiny_tokenizer
from tests.test_hidden_memory import LEFT, LIMIT, hidden_bytes

FORMS = ("f32", "f16", "bf16", "codes")
CONFIG = quantised.model_config()


def stored(form, weights=None):
    """Small weights, or these, in one stored form."""
    if form == "codes":
        return quantised.weights(CONFIG)
    return {name: quantised.STORES[form](w) for name, w in (weights or small.weights(CONFIG)).items()}


def engine(weights, **changes):
    run = small.run_config(**changes)
    plan = small.plan_step(CONFIG, run, weights=weights)
    made = small.Engine(CONFIG, weights, run, plan.extent_bytes, poison=True)
    made.plan = plan
    for p in made.parameters:
        p.value[:] = 0.1
    return made


def results(weights, **changes):
    """Loss and gradients as bytes, and the events of a step beside those of its plan."""
    with engine(weights, **changes) as made:
        batch = small.batch(CONFIG, 3, 13)
        found = [np.float64(made.loss(batch)).tobytes(), *[g.tobytes() for g in made.gradients(batch).values()]]
        made.step([batch], rate=1e-3)
        assert made.arena.ledger.events == made.plan.ledger.events
        assert made.arena.extent == made.plan.extent_bytes and made.setup_events == made.plan.setup_events
        return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", [dict(method="mesp-lean", loss="vocab:50"), dict(method="store", threads=2),
                                     dict(method="mezo"), dict(dtype="float64")], ids=str)
def test_widened_weights_give_the_same_bits(form, changes):
    assert results(stored(form), residency="widened", **changes) == results(stored(form), **changes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype, size", [("float32", 4), ("float64", 8)])
def test_widened_weights_are_counted_and_mapped_ones_are_not(form, dtype, size):
    weights = stored(form)
    count = sum(np.prod(shape) for shape in CONFIG.weight_shapes().values())
    for residency, counted in (("widened", count * size), ("mapped", 0)):
        with engine(weights, residency=residency, dtype=dtype) as made:
            assert made.arena.ledger.live_by_category["weight"] == counted
            assert made.plan.ledger.category_bytes_at_peak().get("weight", 0) == counted
            assert frozen_bytes(weights, made.run) == (counted or sum(w.nbytes for w in weights.values()))


def test_the_plan_says_where_the_frozen_weights_are(tmp_path, capsys):
    config = quantised.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE)
    path = tmp_path / "model"
    folder.save(path, config, small.weights(config), tiny_tokenizer.write(tmp_path / "tokenizer"))
    numbers = sum(np.prod(shape) for shape in config.weight_shapes().values())
    found = {}
    for residency, size in (("mapped", 2), ("widened", 4)):
        flags = ["plan", "--model", str(path), "--seq", "8", "--residency", residency]
        assert main([*flags, "--json"]) == 0
        found[residency] = json.loads(capsys.readouterr().out)
        assert found[residency]["frozen_weight_bytes"] == size * numbers
        main(flags)
        assert ("mapped and not counted" in capsys.readouterr().out) == (residency == "mapped")
    assert found["widened"]["category_bytes_at_peak"]["weight"] == 4 * numbers
    assert "weight" not in found["mapped"]["category_bytes_at_peak"]


@pytest.mark.parametrize("form", ["f16", "bf16"])
def test_copies_of_one_model_agree_within_rounding(form):
    """And exactly with float32 weights that are rounded beforehand: rounding is all that a form does."""
    batch = small.batch(CONFIG, 3, 13)
    with engine(stored("f32")) as exact, engine(stored(form)) as rounded:
        assert exact.loss(batch) == pytest.approx(rounded.loss(batch), rel=1e-2)
        assert exact.loss(batch) != rounded.loss(batch)
    assert results(stored(form)) == results(quantised.widened(stored(form)))


def loud():
    """Weights whose query and key biases are 300 in one number of each head: products of 90,000."""
    weights = small.weights(CONFIG)
    for layer in range(CONFIG.num_hidden_layers):
        for name in ("q_proj", "k_proj"):
            weights[f"model.layers.{layer}.self_attn.{name}.bias"][::CONFIG.head_dim] = 300
    return weights


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("residency", ["mapped", "widened"])
def test_scores_beyond_float16_stay_finite(form, residency):
    weights, biases = stored(form), stored("f32" if form == "codes" else form, loud())
    weights = {name: biases[name] if name.endswith(".bias") else w for name, w in weights.items()}
    with np.errstate(over="ignore"):
        assert np.isinf(np.float16(300) * np.float16(300))                     # what the same product is in 16 bits
    with engine(weights, residency=residency, method="mesp") as made:
        batch = small.batch(CONFIG, 3, 13)
        assert np.isfinite(made.loss(batch))
        assert all(np.isfinite(g).all() and g.any() for g in made.gradients(batch).values())


def test_a_form_that_rounds_gives_other_bits():
    """Negative control: equal bits above are not those of a test that sees no difference."""
    weights = stored("f32")
    assert results(weights) != results({name: round_bf16(w) for name, w in weights.items()})


@pytest.mark.parametrize("form", ["bf16", "codes"])
def test_any_number_of_threads_gives_the_same_bits(form):
    first, *others = [results(stored(form), threads=threads) for threads in (1, 2, 4)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("residency", ["mapped", "widened"])
def test_a_step_on_codes_allocates_next_to_nothing(residency):
    config = quantised.model_config(vocab_size=2000, hidden_size=192, head_dim=32, intermediate_size=512)
    weights, run = quantised.weights(config), small.run_config(batch_size=2, seq=150, residency=residency)
    plan = small.plan_step(config, run, weights=weights)
    with small.Engine(config, weights, run, plan.extent_bytes) as made:
        batch = small.batch(config, 2, 150)
        made.step([batch], rate=1e-3)                        # compile first
        rise, left = hidden_bytes(made, lambda: made.step([batch], rate=1e-3))
    assert rise < LIMIT and left < LEFT
