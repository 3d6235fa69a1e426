"""Methods side by side: whose bytes, which direction, against which gradient; and MeZO's theory."""

import math

import numpy as np
import pytest

from mesp_np.compare import compare, describe, reference_run, theory_cosine
from mesp_np.engine import Engine
from mesp_np.process import SMAPS
from tests import small


def contenders(*methods, rounds=1):
    config = small.model_config()
    runs = [small.run_config(method=method) for method in methods]
    return compare(config, small.weights(config), runs, small.batch(config, 3, 13), rounds)


def compared(*methods, baseline):
    return describe(contenders(*methods), baseline)


def simulated_cosines(d, n, trials):
    """|cos| of (1/n) sum_i (z_i . g) z_i with g, over seeded draws of z; g is the first axis."""
    cosines = []
    for seed in range(trials):
        z = np.random.default_rng([n, seed]).standard_normal((n, d))
        estimate = z[:, 0] @ z
        cosines.append(abs(estimate[0]) / np.linalg.norm(estimate))
    return np.array(cosines)


@pytest.mark.parametrize("n", [1, 2, 4, 16])
def test_theory_is_what_a_simulation_finds(n):
    """Within four standard errors, and n / d for what the formula leaves out."""
    d, trials = 2000, 1000
    cosines, theory = simulated_cosines(d, n, trials), theory_cosine(d, n)
    assert abs(cosines.mean() - theory) < 4 * cosines.std() / math.sqrt(trials) + theory * n / d


def test_theory_for_one_probe():
    for d in (1000, 4_399_104):
        assert math.isclose(theory_cosine(d), math.sqrt(2 / (math.pi * d)), rel_tol=1e-12)
    assert theory_cosine(1000, 500) > 0                              # no overflow on the way


def test_savings_are_the_names_that_differ():
    """MeSP forms silu and the h again, so they are counted on MeBP's side, whoever is the baseline."""
    result = compared("mebp", "mesp", baseline="mebp")
    assert result["mebp"]["saved_bytes"] == 0 and result["mebp"]["differs_in"] == {}
    saved, names = result["mesp"]["saved_bytes"], result["mesp"]["differs_in"]
    assert saved == result["mebp"]["live_peak_bytes"] - result["mesp"]["live_peak_bytes"] == sum(names.values()) > 0
    assert names["silu"] == 39 * 70 * 4 and names["hq"] > 0          # (N, F) in float32
    assert [abs(size) for size in names.values()] == sorted(map(abs, names.values()), reverse=True)
    reverse = compared("mebp", "mesp", baseline="mesp")["mebp"]
    assert reverse["saved_bytes"] == -saved and reverse["differs_in"] == {name: -size for name, size in names.items()}


def test_the_reference_is_an_exact_gradient_whatever_the_order():
    """GIVEN MeZO first, last or alone THEN its cosine is the same number, and exact methods differ in no bit."""
    found = [compared(*methods, baseline="mezo") for methods in (("mezo", "mebp", "mesp"), ("mesp", "mezo"), ("mezo",))]
    assert len({result["mezo"]["gradient_cosine"] for result in found}) == 1
    assert 0 < abs(found[0]["mezo"]["gradient_cosine"]) < 0.5
    for name, row in [item for result in found for item in result.items()]:
        assert (row["gradient_bits_different"] == 0) == (name != "mezo") == (row["gradient_cosine"] > 1 - 1e-12), name
        assert (row["gradient_relative_error"] == 0) == (name != "mezo")


@pytest.mark.parametrize("inexact", [dict(compute="bf16"), dict(checkpoint_store="bf16")], ids=str)
def test_what_is_rounded_is_held_against_what_is_not(inexact):
    """GIVEN a run that rounds THEN its gradient is near the exact one, and how near is measured."""
    config = small.model_config()
    runs = [small.run_config(method=method, **inexact) for method in ("mesp", "mebp")]
    assert reference_run(runs) == small.run_config(method="mesp")
    found = compare(config, small.weights(config), runs, small.batch(config, 3, 13), rounds=1)
    for row in describe(found, "mesp").values():
        assert 0 < row["gradient_relative_error"] < 0.05 and 0.999 < row["gradient_cosine"] < 1
        assert row["gradient_bits_different"] > 0


@pytest.fixture(scope="module")
def large_logits():
    """A model whose step takes some 50 MB, nearly all of them for whole logits, and no time."""
    config, run = small.model_config(vocab_size=50_000), small.run_config(method="mesp", loss="full")
    return config, small.weights(config), run, small.batch(config, 16, 13, ignored=0)


@pytest.mark.skipif(not SMAPS.exists(), reason="Linux tells anonymous memory apart")
def test_the_systems_count_is_the_extent(large_logits, monkeypatch):
    """Within 3 % and 4 MiB; and memory that a step takes beside the arena is seen."""
    config, weights, run, batch = large_logits

    def beyond():
        one, = compare(config, weights, [run], batch, rounds=1)
        extent = one.engine.arena.extent
        assert extent > 32 << 20 and one.resident_bytes > one.os_growth_bytes
        return abs(one.os_growth_bytes - extent) - 0.03 * extent

    assert beyond() < 4 << 20
    step, hidden = Engine.step, []

    def wasteful_step(*given, **named):
        hidden.append(np.ones(1 << 20))
        return step(*given, **named)

    monkeypatch.setattr(Engine, "step", wasteful_step)
    assert beyond() > 4 << 20


def test_seconds_are_the_median_of_the_rounds():
    found = contenders("mesp", "mezo", rounds=3)
    assert [len(one.seconds) for one in found] == [3, 3]
    found[0].seconds, found[1].seconds = (9.0, 1.0, 2.0), (1.0, 100.0, 3.0, 2.0)
    assert [row["seconds_per_step"] for row in describe(found, "mesp").values()] == [2.0, 2.5]
