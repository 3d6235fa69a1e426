"""Compiled kernels are kept where they can be, never used after an op was edited, and no disk ends a run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import mesp_np
from mesp_np import ops
from mesp_np.ops import compiling

PRINT = """
import numpy as np
from mesp_np.ops import quant, residual
from mesp_np.team import Team
exec(SETUP)
out, x = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
residual.forward(Team(1), out, x)
print(out[0, 0], sum(residual._add.compiled.stats.cache_hits.values()))
"""
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))"
ROOT = Path(mesp_np.__file__).parents[1]


def first_kernel(setup="", root=ROOT, **environment):
    """((what residual.forward makes of 1 and 1, kernels found on disk), standard error), in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PRINT.replace("SETUP", repr(setup))], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(root)} | environment, cwd=root, check=True)
    return tuple(map(float, done.stdout.split())), done.stderr


@pytest.fixture
def a_copy(tmp_path):
    """The package without its caches, for an edit."""
    shutil.copytree(ROOT / "mesp_np", tmp_path / "mesp_np", ignore=shutil.ignore_patterns("__pycache__", "weights"))
    return tmp_path


def test_folder_that_cannot_be_written_is_passed_over(tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert compiling.cache_folder("1", (blocked / "below", tmp_path / "good")) == str(tmp_path / "good/kernels-1")
    assert capsys.readouterr().err == ""


def test_an_edit_makes_a_new_folder_and_clears_the_old(tmp_path):
    copy, base = tmp_path / "ops", (tmp_path / "kept",)
    shutil.copytree(ops.HERE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    first = compiling.cache_folder(ops.digest(copy), base)
    (tmp_path / "kept" / "kernels-of-another").mkdir()
    assert compiling.cache_folder(ops.digest(copy), base) == first
    (copy / "quant.py").write_text((copy / "quant.py").read_text() + "\n")
    assert compiling.cache_folder(ops.digest(copy), base) != first and not Path(first).exists()
    assert (tmp_path / "kept" / "kernels-of-another").is_dir()


@pytest.mark.parametrize("edit", ["out[n, d] += x[n, d]", "out[n, d] += 2 * x[n, d]"])
def test_a_changed_kernel_computes_the_change(a_copy, edit):
    """What a student does: change a kernel, run again.  What is as it was is not compiled again."""
    assert [first_kernel(root=a_copy) for _ in range(2)] == [((2, 0), ""), ((2, 1), "")]
    file = a_copy / "mesp_np" / "ops" / "residual.py"
    file.write_text(file.read_text().replace("out[n, d] += x[n, d]", edit))
    assert first_kernel(root=a_copy)[0] == ((3, 0) if "2 *" in edit else (2, 1))


def test_an_edit_while_a_process_runs_is_not_taken_for_what_it_runs(a_copy):
    """GIVEN a number in an op edited between its import and its first call THEN the next process has the new one."""
    file = a_copy / "mesp_np" / "ops" / "residual.py"
    twice = file.read_text().replace("out[n, d] += x[n, d]", "out[n, d] += 2 * x[n, d]")
    file.write_text(twice)
    edit = f"open({str(file)!r}, 'w').write({twice.replace('2 * x', '3 * x')!r})"
    assert first_kernel(edit, a_copy)[0] == (3, 0)
    assert first_kernel(root=a_copy)[0] == (4, 0)


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
@pytest.mark.parametrize("setup", ["", FULL], ids=["nowhere to write", "full disk"])
def test_a_cache_that_cannot_be_written_is_told_in_one_line(tmp_path, setup):
    place = tmp_path / "place"
    if not setup:
        place.write_text("")                            # a file where a folder should be
    (result, hits), told = first_kernel(setup, NUMBA_CACHE_DIR=str(place))
    assert (result, hits) == (2, 0)
    assert told.startswith("mesp-np: compiled kernels are not kept (") and told.count("\n") == 1
    assert str(place) in told or "File too large" in told


def test_the_users_own_place_for_kernels_is_taken_by_the_same_rule(a_copy):
    place, digest = a_copy / "own", ops.digest(a_copy / "mesp_np" / "ops")
    assert [first_kernel(root=a_copy, NUMBA_CACHE_DIR=str(place)) for _ in range(2)] == [((2, 0), ""), ((2, 1), "")]
    assert [path.name for path in place.iterdir()] == [f"kernels-{digest}"]


def test_kernels_call_each_other_and_are_made_once():
    @ops.kernel
    def inner(x):
        return x + 1

    @ops.kernel
    def outer(x):
        return inner(x) * 2

    assert inner.compiled is None
    assert outer(1) == 4 and outer(1.5) == 5.0
    assert isinstance(inner.compiled, numba.core.registry.CPUDispatcher)
    assert compiling.dispatcher(inner) is inner.compiled
