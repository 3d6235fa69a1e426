"""Exact methods have the same gradients to the bit, for any keep set, thread count and loss grouping."""

import numpy as np
import pytest

from mesp_np.block import NAMES
from tests import small


def gradients(shape=(2, 131), config=None, **changes):
    config = config or small.model_config()
    with small.engine(config, batch_size=shape[0], seq=shape[1], **changes) as engine:
        return engine.gradients(small.batch(config, *shape))


def different(ours, theirs):
    """Names whose bits differ, the sign of a zero included; NaN counts as different."""
    return [name for name in ours if ours[name].tobytes() != theirs[name].tobytes() or np.isnan(ours[name]).any()]


def test_the_comparison_sees_every_bit():
    zero, other = np.zeros(3, np.float32), np.array([0, -0.0, 0], np.float32)
    assert different({"a": zero}, {"a": zero.copy()}) == []
    assert different({"a": zero}, {"a": other}) == ["a"]
    assert different({"a": zero * np.nan}, {"a": zero * np.nan}) == ["a"]


@pytest.mark.parametrize("trainable", ["lora", "full"])
@pytest.mark.parametrize("stored", ["float32", "bf16"])
def test_methods_agree(trainable, stored):
    reference = gradients(method="store", trainable=trainable, stored=stored)
    assert all(np.abs(gradient).max() > 0 for gradient in reference.values())
    for method in small.EXACT[1:]:
        assert different(gradients(method=method, trainable=trainable, stored=stored), reference) == [], method


@pytest.mark.parametrize("name", NAMES)
def test_any_single_kept_name(name):
    assert different(gradients(keep=(name,)), gradients(method="store")) == []


def test_random_keep_sets():
    reference, rng = gradients(method="store", targets=("q_proj", "up_proj", "down_proj")), np.random.default_rng(0)
    for _ in range(12):
        keep = tuple(name for name in NAMES if rng.random() < 0.5)
        assert different(gradients(keep=keep, targets=("q_proj", "up_proj", "down_proj")), reference) == [], keep


@pytest.mark.parametrize("method", ["mebp", "mesp-lean", "mezo"])
@pytest.mark.parametrize("threads", [2, 4])
def test_threads(method, threads):
    config = small.model_config(hidden_size=264, head_dim=44, intermediate_size=300)
    one = gradients((3, 140), config, method=method, threads=1, stored="bf16")
    assert different(gradients((3, 140), config, method=method, threads=threads, stored="bf16"), one) == []


@pytest.mark.parametrize("loss", ["rows:7", "rows:64", "vocab:10", "vocab:83", "full"])
def test_loss_variants_agree(loss):
    reference, ours = (gradients(loss=variant, dtype="float64", stored="float64") for variant in ("rows:1", loss))
    for name, gradient in ours.items():
        assert np.abs(gradient - reference[name]).max() <= 1e-12 * np.abs(reference[name]).max(), name


@pytest.mark.parametrize("changes", [dict(optimizer="sgd"), dict(optimizer="adamw")], ids=str)
def test_fused_update_is_the_same_step(changes):
    config, values = small.model_config(), {}
    for update in ("after", "fused"):
        with small.engine(config, update=update, **changes) as engine:
            for _ in range(3):
                engine.step([small.batch(config, 3, 13)], rate=0.01)
            values[update] = {p.name: p.value.copy() for p in engine.parameters}
    assert different(values["after"], values["fused"]) == []


def test_accumulation_is_the_whole_batch():
    """Rows with 2, 9, 4 and 30 trained tokens: the mean is over tokens, not over rows."""
    config = small.model_config()
    whole = small.batch(config, 4, 31, ignored=0)
    for row, count in enumerate((2, 9, 4, 30)):
        whole.labels[row, count:] = -100
    results = []
    with small.engine(config, stored="float64", dtype="float64", batch_size=1, seq=31) as engine:
        rows = [engine.loss(type(whole).of(whole.ids[i:i + 1], whole.labels[i:i + 1])) for i in range(4)]
    for size in (4, 2, 1):
        parts = [type(whole).of(whole.ids[i:i + size], whole.labels[i:i + size]) for i in range(0, 4, size)]
        with small.engine(config, stored="float64", dtype="float64", batch_size=size, seq=31,
                          grad_accumulation=len(parts)) as engine:
            result = engine.step(parts, rate=0.1)
            results.append((result.loss, result.grad_norm, *[p.value.copy() for p in engine.parameters]))
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)
    assert results[0][0] == pytest.approx(np.average(rows, weights=(2, 9, 4, 30)), rel=1e-12)
    assert results[0][0] != pytest.approx(np.mean(rows), rel=1e-3)
