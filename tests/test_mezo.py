"""MeZO: theta is restored to the bit, and the estimate has the mean and the cosine of the theory."""

import math

import numpy as np
import pytest

from tests import small


def flat(gradients):
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients)]).astype(np.float64)


def cosines(count, **changes):
    """|cos| of MeZO's estimate with the exact gradient over many seeds, and the mean estimate's cosine."""
    config = small.model_config(num_hidden_layers=1)
    batch = small.batch(config, 2, 5)
    settings = dict(stored="float64", dtype="float64", batch_size=2, seq=5, targets=("q_proj", "v_proj"))
    with small.engine(config, method="mesp-lean", **settings) as engine:
        exact = flat(engine.gradients(batch))
    with small.engine(config, method="mezo", mezo_eps=1e-5, **settings, **changes) as engine:
        estimates = []
        for engine.steps in range(count):
            estimates.append(flat(engine.gradients(batch)))
    cos = [abs(e @ exact) / np.linalg.norm(e) / np.linalg.norm(exact) for e in estimates]
    mean = np.mean(estimates, axis=0)
    return np.array(cos), mean @ exact / np.linalg.norm(exact) ** 2, len(exact)


@pytest.mark.parametrize("dtype, stored", [("float32", "float32"), ("float32", "bf16"), ("float64", "float64")])
def test_restore_is_exact(dtype, stored):
    """Two hundred steps at learning rate 0 leave every bit as it was."""
    config = small.model_config(num_hidden_layers=1)
    with small.engine(config, stored, method="mezo", dtype=dtype, probes=2, weight_decay=0.0,
                      targets=("q_proj", "up_proj")) as engine:
        before = [p.value.copy() for p in engine.parameters]
        batch = small.batch(config, 1, 3, ignored=0)
        for _ in range(200):
            engine.step([batch], rate=0.0)
        assert all((p.value == value).all() for p, value in zip(engine.parameters, before, strict=True))


def test_published_scheme_drifts():
    """The negative control: +1, -2, +1 in place does not come back to the same bits."""
    config = small.model_config()
    with small.engine(config, method="mezo", perturb="inplace", weight_decay=0.0) as engine:
        before = [p.value.copy() for p in engine.parameters]
        engine.step([small.batch(config, 3, 13)], rate=0.0)
        moved = [np.mean(p.value != value) for p, value in zip(engine.parameters, before, strict=True)]
        assert 0.05 < np.mean(moved) < 0.9
        assert all(np.abs(p.value - value).max() < 1e-6 for p, value in zip(engine.parameters, before, strict=True))


def test_cosine_is_that_of_the_theory():
    cos, projection, d = cosines(600)
    theory = math.sqrt(2 / (math.pi * d))
    deviation = math.sqrt((1 / d - theory ** 2) / len(cos))           # of the mean of |cos| over the seeds
    assert abs(cos.mean() - theory) < 4 * deviation


def test_mean_estimate_approaches_the_gradient():
    """E[g_hat . g] / |g|^2 = 1, and one seed's value has variance 2 (of z.g squared)."""
    _, projection, _ = cosines(600)
    assert abs(projection - 1) < 4 * math.sqrt(2 / 600)


def test_probes_are_averaged_not_added():
    """The mean over n probes is unbiased too, with an n-th of the variance."""
    _, projection, _ = cosines(150, probes=4)
    assert abs(projection - 1) < 4 * math.sqrt(2 / (150 * 4))


def test_probes_raise_the_cosine():
    one, _, _ = cosines(100)
    sixteen, _, _ = cosines(60, probes=16)
    assert 3.0 < sixteen.mean() / one.mean() < 6.5                    # about sqrt(16), and |N| against its mean


def test_tensors_of_equal_shape_get_different_noise():
    with small.engine(method="mezo") as engine:
        estimate = engine.gradients(small.batch(engine.config, 3, 13))
        a, b = estimate["layers.0.mlp.gate_proj.lora_A"], estimate["layers.0.mlp.up_proj.lora_A"]
        assert not np.allclose(a / np.abs(a).max(), b / np.abs(b).max())


def test_loss_goes_down():
    config = small.model_config()
    with small.engine(config, method="mezo", mezo_eps=1e-3, probes=4) as engine:
        batch = small.batch(config, 3, 13)
        before = engine.loss(batch)
        for _ in range(40):
            engine.step([batch], rate=2e-4)
        assert engine.loss(batch) < before - 0.02
