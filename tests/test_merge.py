"""Merging: the merged model is the adapted one, and what rounding loses is told."""

import numpy as np
import pytest

from mesp_np.errors import UserError
from mesp_np.generate import generator
from mesp_np.merge import Rounding, merged_weights
from mesp_np.ops.quant import BF16, Quantised, quantise, round_bf16, widen
from tests import small

SETTINGS = dict(rank=4, alpha=6.0, batch_size=1, seq=13)
QUERY = "model.layers.0.self_attn.q_proj.weight"


def adapted(config, weights, **changes):
    """An engine on these weights, its adapters filled with numbers."""
    run = small.run_config(**(SETTINGS | changes))
    plan = small.plan_step(config, run, weights=weights)
    engine = small.Engine(config, weights, run, plan.extent_bytes)
    rng = np.random.default_rng(1)
    for p in engine.parameters:
        p.value[:] = 0.2 * rng.standard_normal(p.value.shape)
    return engine


def written(weights):
    """The arrays that a file would hold."""
    return {name: np.concatenate([weight[:7], weight[7:]]) if weight.shape[0] > 7 else weight[:]
            for name, weight in weights.items()}


def loss(config, weights, **changes):
    with adapted(config, weights, **changes) as engine:
        return engine.loss(small.batch(config, 1, 13))


def logits(engine):
    return np.array(generator(engine, 13).logits(list(range(20, 33))))


def dense(stored):
    out = np.empty(stored.shape, np.float32)
    widen(out, stored)
    return out


def coded(weights):
    """Every matrix as codes of 8 bits with scales in bfloat16."""
    made = dict(weights)
    for name, array in weights.items():
        if array.ndim == 2:
            codes, scales, biases = quantise(array, 8, 32)
            made[name] = Quantised(codes, round_bf16(scales), round_bf16(biases), 8)
    return made


@pytest.mark.parametrize("changes", [{}, {"rslora": True, "targets": ("q_proj", "down_proj")}, {"layers": (-1,)}])
def test_the_merged_model_is_the_adapted_one(changes):
    config = small.model_config()
    weights = small.weights(config)
    with adapted(config, weights, **changes) as engine:
        expected = engine.loss(small.batch(config, 1, 13))
        merged, rounding = merged_weights(engine, weights)
        merged = written(merged)
    assert abs(loss(config, merged, trainable="none") - expected) < 1e-5
    assert abs(loss(config, weights, trainable="none") - expected) > 1e-2
    assert rounding.tensors == len(changes.get("targets", range(7))) * len(changes.get("layers", range(2)))
    assert rounding.lost == 0.0 and rounding.change > 0              # float32 holds the sum as it was formed


def test_the_scale_is_applied_once():
    """Each element by the formula; twice the scale, or none, is far off."""
    config = small.model_config()
    weights = small.weights(config)
    with adapted(config, weights) as engine:
        merged = written(merged_weights(engine, weights)[0])[QUERY]
        lora = engine.model.params.layers[0].linear["q"].lora
        change = lora.B.value.astype(np.float64) @ lora.A.value
    for scale, right in ((6.0 / 4, True), ((6.0 / 4) ** 2, False), (1.0, False)):
        assert (np.abs(weights[QUERY] + scale * change - merged).max() < 1e-6) == right


def test_logits_merged_in_float32_are_those_of_the_adapter():
    """Every one of them to a hundred-thousandth; with twice the scale they are far off."""
    config = small.model_config()
    weights = small.weights(config)
    with adapted(config, weights) as engine, adapted(config, weights, alpha=12.0) as louder:
        expected, other = logits(engine), logits(louder)
        merged = written(merged_weights(engine, weights)[0])
    with adapted(config, merged, trainable="none") as engine:
        np.testing.assert_allclose(logits(engine), expected, rtol=1e-5, atol=1e-5)
        assert np.abs(logits(engine) - other).max() > 0.1


@pytest.mark.parametrize("stored", ["bf16", "f16"])
def test_rounded_once_to_the_stored_form(stored):
    config = small.model_config()
    halves = {name: round_bf16(array) if stored == "bf16" else array.astype(np.float16)
              for name, array in small.weights(config).items()}
    with adapted(config, halves) as engine:
        merged, rounding = merged_weights(engine, halves)
        merged = written(merged)
        lora = engine.model.params.layers[0].linear["q"].lora
        exact = dense(halves[QUERY]) + np.float32(1.5) * (lora.B.value @ lora.A.value)
    assert all(merged[name].dtype == array.dtype for name, array in halves.items())
    expected = round_bf16(exact) if stored == "bf16" else exact.astype(np.float16)
    assert np.array_equal(merged[QUERY], expected)
    assert rounding.elements == sum(array.size for name, array in halves.items() if name.endswith("_proj.weight"))


def test_what_rounding_loses():
    """A change of 0.001 and 0.01 at 1.0: bfloat16 has steps of 1/128 there, so the first is lost and 0.0078 is kept."""
    change = np.array([[0.001, 0.01]], np.float32)
    rounding = Rounding()
    rounding.add(change, 1 + change - dense(round_bf16(1 + change)))
    assert rounding.mean_change == pytest.approx(0.0055)
    assert rounding.mean_part_lost == pytest.approx((0.001 + 0.0021875) / 0.011, rel=1e-4)
    assert rounding.largest_part_lost == pytest.approx(0.21875, rel=1e-4)
    assert Rounding().mean_part_lost == Rounding().largest_part_lost == 0.0


def test_a_quantised_base_becomes_dense_in_the_form_of_its_scales():
    config = small.model_config(hidden_size=64, intermediate_size=64, num_attention_heads=8)
    weights = coded(small.weights(config))
    with adapted(config, weights) as engine:
        expected = engine.loss(small.batch(config, 1, 13))
        merged, rounding = merged_weights(engine, weights)
        merged = written(merged)
        lora = engine.model.params.layers[0].linear["q"].lora
        exact = dense(weights[QUERY]) + np.float32(1.5) * (lora.B.value @ lora.A.value)
    assert {array.dtype for array in merged.values() if array.ndim == 2} == {BF16}
    assert np.array_equal(merged[QUERY], round_bf16(exact))
    assert np.array_equal(merged["model.embed_tokens.weight"], round_bf16(dense(weights["model.embed_tokens.weight"])))
    assert abs(loss(config, merged, trainable="none") - expected) < 0.05 and rounding.tensors == 14


def test_a_sum_beyond_float16_is_refused():
    config = small.model_config()
    weights = {name: array.astype(np.float16) for name, array in small.weights(config).items()}
    expect_refusal(config, weights, "float16", 1e6)


def expect_refusal(config, weights, form, number):
    """Of the one weight with this number in its adapter, and of no other."""
    with adapted(config, weights) as engine:
        lora = engine.model.params.layers[0].linear["q"].lora
        lora.A.value[1, :] = 2
        lora.B.value[3, 1] = number
        merged, _ = merged_weights(engine, weights)
        written({name: weight for name, weight in merged.items() if name != QUERY})
        with pytest.raises(UserError, match=f"{QUERY}: not all of its values would be finite numbers in {form}"):
            merged[QUERY][:]


@pytest.mark.parametrize("stored, form", [("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32"),
                                          ("codes", "bfloat16")])
@pytest.mark.parametrize("number", [np.nan, -np.inf, 3e38])
def test_what_is_not_finite_is_refused_in_every_form(stored, form, number):
    """3e38 is finite in the adapter and too much once it is multiplied by the scale and A."""
    config = small.model_config(hidden_size=64, intermediate_size=64, num_attention_heads=8)
    weights = coded(small.weights(config)) if stored == "codes" else {
        name: {"bf16": round_bf16, "f16": np.float16, "f32": np.float32}[stored](array)
        for name, array in small.weights(config).items()}
    expect_refusal(config, weights, form, number)


def test_a_damaged_base_is_refused():
    config = small.model_config()
    weights = small.weights(config)
    weights[QUERY] = weights[QUERY].copy()
    weights[QUERY][3, 1] = np.inf
    expect_refusal(config, weights, "float32", 0.1)
