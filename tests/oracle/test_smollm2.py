"""A real model in every stored form, against transformers + PEFT: logits, loss and each of 420 gradients."""

import functools

import numpy as np
import pytest

pytestmark = pytest.mark.oracle
for package in ("torch", "transformers", "peft"):
    pytest.importorskip(package)

from mesp_np.checkpoint import safetensors_file  # noqa: E402
from mesp_np.ops import rope  # noqa: E402
from tests.oracle import pytorch  # noqa: E402
from tests.oracle.conftest import FORMS  # noqa: E402

TOLERANCE = {"float32": 1e-4, "float64": 1e-10}
LENGTH = 64


@pytest.fixture(scope="module")
def theirs(smollm2):
    """A function from a form to PyTorch's result, computed once for forms with the same weights."""

    @functools.cache
    def result(form):
        quantised = form == "mlx-4bit"
        path = smollm2("f32" if quantised else form)
        weights = pytorch.dequantised(smollm2(form)) if quantised else None
        return pytorch.theirs(path, *pytorch.batch(path, LENGTH), weights)

    return lambda form: result(form.removesuffix("-2"))


def ours(path, dtype, **changes):
    return pytorch.ours(path, *pytorch.batch(path, LENGTH), dtype, **changes)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_pytorchs_numbers(smollm2, theirs, form, dtype):
    differences = pytorch.differences(ours(smollm2(form), dtype), theirs(form))
    assert len(differences) == 3 + 2 * 7 * 30
    worst = max(differences, key=differences.get)
    assert differences[worst] < TOLERANCE[dtype], worst


def test_the_quantised_folder_holds_the_numbers_of_the_f32_folder_to_the_bit(smollm2):
    """Packing the codes of the GGUF file anew loses nothing."""
    dense = pytorch.dequantised(smollm2("mlx-4bit"), np.float32)
    plain = safetensors_file.read(smollm2("f32") / "model.safetensors")
    assert set(dense) == set(plain)
    for name, array in plain.items():
        assert np.array_equal(dense[name].view(np.uint32), array.view(np.uint32)), name


def change_an_adapter(engine):
    """One per cent, in one adapter of 420."""
    next(p for p in engine.parameters if p.name == "layers.17.mlp.up_proj.lora_B").value[:] *= 1.01


def drop_a_bias(engine):
    engine.model.params.layers[4].linear["k"].bias = None


def turn_too_far(engine):
    """RoPE with a base that is one per cent off."""
    rope.tables(engine.team, engine.model.cos, engine.model.sin, 1.01 * engine.config.rope_theta)


@pytest.mark.parametrize("mistake", [change_an_adapter, drop_a_bias, turn_too_far])
def test_a_small_mistake_is_seen(smollm2, theirs, mistake):
    differences = pytorch.differences(ours(smollm2("bf16"), "float32", perturb=mistake), theirs("bf16"))
    assert max(differences.values()) > 10 * TOLERANCE["float32"]
