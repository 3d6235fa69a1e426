"""What every test may ask for: a dtype, a team with scratch in that dtype, and seeded random numbers."""

import numpy as np
import pytest

from mesp_np.gradcheck import equipped_team
from mesp_np.placement import SCHEDULES

pytest.register_assert_rewrite("tests.op_checks")


@pytest.fixture(scope="session", params=[np.float32, np.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


@pytest.fixture(scope="session")
def team(dtype):
    with equipped_team(threads=2, dtype=dtype) as team:
        yield team


@pytest.fixture(autouse=True)
def schedules_of_its_own(request):
    """A test that changes the code does not follow what was planned without its change, nor do others with it."""
    if "monkeypatch" in request.fixturenames:
        SCHEDULES.clear()
        yield
        SCHEDULES.clear()
    else:
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(0)
