"""The same bits for any number of threads: tiles depend on shapes alone."""

import numpy as np
import pytest

from mesp_np.gradcheck import equipped_team
from tests import op_checks
from tests.op_calls import CALLS


@pytest.fixture(scope="module")
def teams():
    teams = [equipped_team(threads, np.float32) for threads in (1, 2, 4)]
    yield teams
    for team in teams:
        team.close()


@pytest.mark.parametrize("call", CALLS, ids=repr)
def test_threads(teams, call):
    one, *others = [run(team, call) for team in teams]
    for other in others:
        for name in set(one) - {"scratch"}:
            op_checks.same_bits(other[name], one[name])


def run(team, call):
    """All arrays after the call, from the same positive numbers each time."""
    rng = np.random.default_rng(0)
    arrays = call.arrays(lambda shape, dtype: (rng.random(shape) + 0.5).astype(dtype), np.float32)
    call(team, arrays)
    return arrays
