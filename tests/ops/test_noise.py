"""Noise from a counter: a normal distribution, and the same numbers however it is cut."""

import math

import numpy as np
import pytest

import mesp_np.team
from mesp_np.gradcheck import equipped_team
from mesp_np.ops import noise
from tests import op_checks

COUNT = 200_000


def draw(team, dtype, key, count=COUNT):
    out = np.empty(count, dtype)
    noise.add_noise(team, out, np.zeros_like(out), key, 1.0)
    return out


def test_moments(team, dtype):
    """Of a standard normal, within four standard errors."""
    z, error = draw(team, dtype, noise.key(0)), COUNT ** -0.5
    assert abs(z.mean()) < 4 * error
    assert abs(z.var() - 1) < 4 * 2 ** 0.5 * error
    assert abs((z ** 3).mean()) < 4 * 15 ** 0.5 * error
    assert abs((z ** 4).mean() - 3) < 4 * 96 ** 0.5 * error
    assert abs((np.abs(z) < 1).mean() - 0.682689) < 4 * 0.47 * error


def test_pairs_are_box_and_mullers():
    key = noise.key(0)
    for pair in range(2000):
        radius = math.sqrt(-2 * math.log(1 - noise.uniform(key, 2 * pair)))
        angle = 2 * math.pi * noise.uniform(key, 2 * pair + 1)
        expected = radius * math.cos(angle), radius * math.sin(angle)
        assert np.abs(np.subtract(noise.normals(key, pair), expected)).max() < 1e-15 * (1 + radius)


def test_logarithm_and_turn_at_their_ends():
    for u in (1.0, 1 - 2.0 ** -52, 0.75, 0.5 ** 0.5, 0.5, 0.25, 2.0 ** -52):
        assert abs(noise._log(u) - math.log(u)) <= 3e-16 * abs(math.log(u))
    for eighth in range(8):
        for u in (eighth / 8, eighth / 8 + 2.0 ** -52, (eighth + 1) / 8 - 2.0 ** -52):
            turn = math.cos(2 * math.pi * u), math.sin(2 * math.pi * u)
            assert np.abs(np.subtract(noise._turn(u), turn)).max() < 1e-15


def test_independence(team, dtype):
    """Of neighbours, of the halves of a pair and their squares, and of different keys."""
    z, other = draw(team, dtype, noise.key(0)), draw(team, dtype, noise.key(1))
    pairs = [(z[:-1], z[1:]), (z[:-2], z[2:]), (z[::2], z[1::2]), (z[::2] ** 2, z[1::2] ** 2), (z, other)]
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 * len(a) ** -0.5


def test_keys_differ_in_every_number():
    keys = [noise.key(*numbers) for numbers in ((0,), (0, 0), (0, 1), (1, 0), (1, 1), (2 ** 40, 1), (-1, 1))]
    assert len(set(keys)) == len(keys) and all(isinstance(key, np.uint64) for key in keys)
    assert noise.key(3, 1) == noise.key(3, 1)


@pytest.mark.parametrize("count", [1, 2, 7, 1001])
def test_a_shorter_tensor_has_the_first_of_the_numbers(team, dtype, count):
    op_checks.same_bits(draw(team, dtype, noise.key(0), count), draw(team, dtype, noise.key(0), 1002)[:count])


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("threads", [1, 4])
def test_any_chunks_and_threads_have_the_same_bits(team, dtype, monkeypatch, chunk, threads):
    whole = draw(team, dtype, noise.key(0), 1001)
    monkeypatch.setattr(mesp_np.team, "CHUNK", chunk)
    with equipped_team(threads) as other:
        op_checks.same_bits(draw(other, dtype, noise.key(0), 1001), whole)


def test_shape_does_not_matter_and_scale_does(team, rng, dtype):
    [base] = op_checks.normal(rng, dtype, (7, 11))
    out = np.empty_like(base)
    noise.add_noise(team, out, base, noise.key(0), 0.25)
    z = draw(team, dtype, noise.key(0), 77).reshape(7, 11)
    op_checks.same_bits(out, base + dtype(0.25) * z)


def test_alias(team, rng, dtype):
    [base] = op_checks.normal(rng, dtype, (7, 11))
    op_checks.alias(team, lambda team, out, base: noise.add_noise(team, out, base, noise.key(0), 0.25),
                    {"base": base}, {"out": "base"})
