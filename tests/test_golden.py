"""Logits, losses and every gradient against PyTorch autograd (transformers + PEFT) in float64."""

import numpy as np
import pytest

from mesp_np.generate import generator
from tests import golden_data, small

TOLERANCE = 1e-10


def relative(ours, theirs):
    return np.abs(ours - theirs).max() / np.abs(theirs).max()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_loss_and_logits(trainable, tied):
    """The loss of the batch, and the logits of every position, each row fed to a generator token by token."""
    golden = golden_data.load(f"{trainable}_{'tied' if tied else 'untied'}")
    with golden_data.engine(tied, trainable=trainable) as engine:
        assert relative(engine.loss(golden_data.batch(golden)), golden["loss"]) < TOLERANCE
        for ids, logits in zip(golden["ids"], golden["logits"], strict=True):
            source = generator(engine, len(ids))
            assert relative(np.array([source.logits([token]) for token in ids]), logits) < TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", small.EXACT)
def test_adapter_gradients(method, tied):
    golden = golden_data.load("lora_tied" if tied else "lora_untied")
    with golden_data.engine(tied, method=method) as engine:
        gradients = engine.gradients(golden_data.batch(golden))
    assert len(gradients) == 28
    for name, gradient in gradients.items():
        assert relative(gradient, golden["grad/" + name]) < TOLERANCE, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss", ["rows:4", "vocab:10", "full"])
def test_full_gradients(loss, tied):
    golden = golden_data.load("full_tied" if tied else "full_untied")
    with golden_data.engine(tied, trainable="full", loss=loss) as engine:
        gradients = engine.gradients(golden_data.batch(golden))
    assert set(gradients) == {key.removeprefix("grad/") for key in golden if key.startswith("grad/")}
    for name, gradient in gradients.items():
        assert relative(gradient, golden["grad/" + name]) < TOLERANCE, name


@pytest.mark.parametrize("optimizer, rate, decay", [("sgd", 0.1, 0.0), ("adamw", 0.01, 0.01)])
@pytest.mark.parametrize("update", ["after", "fused"])
def test_ten_steps(optimizer, rate, decay, update):
    golden = golden_data.load("lora_tied")
    with golden_data.engine(optimizer=optimizer, weight_decay=decay, update=update) as engine:
        losses = [engine.step([golden_data.batch(golden)], rate).loss for _ in range(10)]
    assert np.allclose(losses, golden["losses_" + optimizer], rtol=1e-9)
