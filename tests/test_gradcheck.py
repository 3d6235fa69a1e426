"""The checker itself: right gradients pass, and every kind of wrong one fails."""

import math
from dataclasses import replace

import numpy as np
import pytest

from mesp_np.gradcheck import check_gradient, check_op, check_ops, equipped_team
from mesp_np.op_cases import OP_CASES

TOLERANCE = 1e-7
NOTHING_TO_SCALE = ("T=1 ", "zero row 1x1")         # one key or an all-zero input: gradients of zero


def check(case, backward):
    """The checks of a case with another backward."""
    with equipped_team() as team:
        return check_op(team, replace(case, backward=backward), False, np.random.default_rng(1))


def find(name):
    return next(case for case in OP_CASES if case.name.startswith(name))


def cubes(x):
    return float(np.sum(x ** 3))


def check_cubes(x, gradient, exhaustive=False):
    rng = np.random.default_rng(0)
    [result] = check_gradient("cubes", cubes, {"x": x}, {"x": gradient}, TOLERANCE, exhaustive, rng)
    return result


@pytest.mark.parametrize("exhaustive", [False, True], ids=["directional", "exhaustive"])
def test_every_op_passes(exhaustive):
    """With room to spare, so that a failure is never rounding."""
    checks = check_ops(exhaustive)
    assert max(check.max_relative_error for check in checks) < TOLERANCE / 3
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("case", [case for case in OP_CASES if not any(part in case.name for part in NOTHING_TO_SCALE)],
                         ids=lambda case: case.name)
def test_one_part_in_two_thousand_fails(case):
    def wrong(team, dout, **inputs):
        return {name: gradient * (1 + 1 / 2000) for name, gradient in case.backward(team, dout, **inputs).items()}

    for result in check(case, wrong):
        assert not result.passed
        assert result.max_relative_error == pytest.approx(1 / 2001, rel=1e-3)


def test_rope_turned_the_wrong_way_fails():
    case = find("rope")
    [result] = check(case, lambda team, dout, x, **sizes: {"x": case.forward(team, dout, **sizes)})
    assert result.max_relative_error > 0.01


def test_lora_without_its_scale_fails():
    case = find("lora")
    results = check(case, lambda team, dout, scale, **inputs: case.backward(team, dout, scale=1.0, **inputs))
    assert all(result.max_relative_error == pytest.approx(0.3) for result in results)


def test_attention_without_the_sum_over_its_group_fails():
    """dk and dv of the group's last head only."""
    case = find("attention tiles")

    def last_head_only(team, dout, **inputs):
        B, H, T, _ = inputs["shape"]
        heads = dout.reshape(B * T, H, -1).copy()
        heads[:, ::2] = 0
        return case.backward(team, dout, **inputs) | {
            name: gradient for name, gradient in case.backward(team, heads.reshape(dout.shape), **inputs).items()
            if name != "q"}

    assert [result.passed for result in check(case, last_head_only)] == [True, False, False]


def test_exhaustive_names_the_worst_element(rng):
    x = rng.standard_normal((4, 5))
    gradient = 3 * x ** 2
    gradient[0, 0] *= 1.001
    gradient[2, 3] *= -1
    result = check_cubes(x, gradient, exhaustive=True)
    assert not result.passed and result.name == "cubes.x"
    assert result.where.startswith(f"[2, 3]: numeric {3 * x[2, 3] ** 2:.6g}")


def test_one_wrong_element_shows_along_random_directions(rng):
    x = rng.standard_normal((40, 50))
    gradient = 3 * x ** 2
    gradient[2, 3] += 1e-3
    assert check_cubes(x, 3 * x ** 2).passed and not check_cubes(x, gradient).passed


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("exhaustive", [False, True])
def test_a_gradient_that_is_not_finite_fails(rng, bad, exhaustive):
    x = rng.standard_normal((4, 5))
    gradient = 3 * x ** 2
    gradient[1, 2] = bad
    result = check_cubes(x, gradient, exhaustive)
    assert not result.passed and result.max_relative_error == math.inf and result.where.startswith("[1, 2]")


def test_a_function_that_is_not_finite_fails(rng):
    [result] = check_gradient("nan", lambda x: math.nan, {"x": np.ones(3)}, {"x": np.ones(3)}, TOLERANCE, False, rng)
    assert not result.passed and result.max_relative_error == math.inf


def test_zero_gradients(rng):
    """A function that does not move passes with a gradient of zeros; one that moves does not."""
    def constant(x):
        return 5.0

    zeros = {"x": np.zeros(3)}
    assert check_gradient("constant", constant, {"x": np.ones(3)}, zeros, TOLERANCE, True, rng)[0].passed
    assert not check_cubes(np.ones(3), np.zeros(3), exhaustive=True).passed


def test_inputs_are_moved_in_place_and_restored_exactly(rng):
    """The function may read the array from somewhere else, and may fail half-way."""
    x = rng.standard_normal((4, 5))
    before, seen = x.tobytes(), set()

    def function(**inputs):
        seen.add(x.tobytes())
        return cubes(x)

    assert check_gradient("held", function, {"x": x}, {"x": 3 * x ** 2}, TOLERANCE, False, rng)[0].passed
    assert len(seen) == 12 and x.tobytes() == before
    with pytest.raises(ZeroDivisionError):
        check_gradient("fails", lambda x: 1 / 0, {"x": x}, {"x": x}, TOLERANCE, False, rng)
    assert x.tobytes() == before


def test_the_same_seed_gives_the_same_result():
    assert check_ops(seed=3, only="lora") == check_ops(seed=3, only="lora") != check_ops(seed=4, only="lora")
