"""The worker team: every tile once, errors carried home, phantoms counted and not computed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import mesp_np.team
from mesp_np.arena import phantom
from mesp_np.team import Team

AT_WORK = """
import sys
from pathlib import Path
from tests import small

def tasks():
    return {task.name: (task / "schedstat").read_text() for task in Path("/proc/self/task").iterdir()}

first = tasks()
config = small.model_config(hidden_size=264, head_dim=44, intermediate_size=300)
with small.engine(config, batch_size=2, seq=140, threads=int(sys.argv[1])) as engine:
    batch = small.batch(config, 2, 140)
    engine.step([batch], rate=0.1)
    before = tasks()
    engine.step([batch], rate=0.1)
    after = tasks()
main = min(first, key=int)
print(len(after) - len(first), sum(after[task] != before[task] for task in after if task != main))
"""


def blas_threads():
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("tiles", [0, 1, 3, 100])
def test_every_tile_is_done_once(threads, tiles):
    done = np.zeros(tiles, int)

    def task(worker, tile):
        assert 0 <= worker < threads
        done[tile] += 1

    with Team(threads) as team:
        team.run(done, tiles, task, flops=0)
    assert (done == 1).all()


@pytest.mark.parametrize("shape", [(1, 1), (100, 7), (7, 100), (64, 64), (5, 0), (0, 5)])
def test_row_ranges_cover_every_row_once(monkeypatch, shape):
    monkeypatch.setattr(mesp_np.team, "CHUNK", 128)
    out = np.zeros(shape)

    def kernel(out, start, stop):
        assert 0 <= start < stop <= shape[0] and (stop - start) * shape[1] <= max(128, shape[1])
        out[start:stop] += 1

    with Team(2) as team:
        team.rows(kernel, out, flops=3)
        assert team.flops["forward"] == 3 * out.shape[0] * max(1, shape[1])
    assert (out == 1).all()


@pytest.mark.parametrize("failing", [0, 1], ids=["caller", "helper"])
def test_an_error_reaches_the_caller(failing):
    """Both workers hold a tile when one of them fails; the team then works on."""
    both_busy, out = threading.Barrier(2, timeout=10), np.zeros(2)

    def task(worker, tile):
        both_busy.wait()
        if worker == failing:
            raise ValueError(f"worker {worker}")
        out[tile] = 1

    with Team(2) as team:
        with pytest.raises(ValueError, match=f"worker {failing}"):
            team.run(out, 2, task, flops=0)
        assert out.sum() == 1
        team.run(out, 2, lambda _, tile: both_busy.wait(), flops=0)


def test_a_phantom_is_counted_and_not_computed():
    with Team(2) as team:
        team.run(phantom((4,), np.float32), 4, lambda *_: pytest.fail("computed"), flops=7)
        with team.counting("backward"):
            team.rows(lambda *_: pytest.fail("computed"), phantom((4, 5), np.float32), flops=2)
            with team.counting("recompute"):
                team.rows(lambda *_: pytest.fail("computed"), phantom((4,), np.float32), width=100, flops=2)
        assert team.phase == "forward"
        assert team.flops == {"forward": 7, "backward": 40, "recompute": 800}


def test_blas_has_one_thread_until_the_last_team_is_closed(monkeypatch):
    monkeypatch.setattr(mesp_np.team, "_blas", mesp_np.team._SingleThreadedBlas())    # as if no other team were open
    with threadpool_limits(limits=2, user_api="blas"):
        first, second = Team(), Team()
        first.close()
        first.close()
        assert blas_threads() == {1}
        second.close()
        assert blas_threads() == {2}


def test_close_lets_the_helpers_go():
    before = set(threading.enumerate())
    team = Team(4)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 3
    team.close()
    for helper in helpers:
        helper.join(timeout=10)
    assert not any(helper.is_alive() for helper in helpers)


def test_workers_at_work_have_different_numbers():
    """So that each has a row of scratch to itself."""
    both_busy, rows = threading.Barrier(2, timeout=10), []

    def task(worker, _):
        both_busy.wait()
        rows.append(worker)

    with Team(2) as team:
        team.run(np.zeros(2), 2, task, flops=0)
    assert sorted(rows) == [0, 1]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux says of each thread whether it ran")
@pytest.mark.parametrize("threads", [1, 2])
def test_no_thread_works_beside_those_that_were_asked_for(threads):
    """Neither BLAS's own, which are there and idle, nor Numba's: besides the caller, only the team's helpers run."""
    done = subprocess.run([sys.executable, "-c", AT_WORK, str(threads)], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[1])
    assert done.stdout.split() == [str(threads - 1)] * 2


@pytest.mark.parametrize("value", ["0", "-1", "many", ""])
def test_numbas_own_number_of_threads_is_of_no_matter(value):
    """Where it is no number at all it is dropped before Numba sees it; one that is right stays for other programs."""
    def numbers(value):
        code = "import mesp_np.ops, os; print(os.environ.get('NUMBA_NUM_THREADS'))"
        environment = {**os.environ, "NUMBA_NUM_THREADS": value}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment,
                              cwd=Path(__file__).parents[1])
        return done.stdout.strip(), done.stderr

    assert numbers(value) == ("None", "")
    if value == "0":
        assert numbers("2") == ("2", "")
