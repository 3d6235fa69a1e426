"""Compiled kernels are kept where they can be, and never used after an op was edited."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mesp_np
from mesp_np import ops

PRINT = """
import numpy as np
from mesp_np.ops import quant, residual
from mesp_np.team import Team
out, x = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
residual.forward(Team(1), out, x)
print(out[0, 0])
"""


def test_folder_that_cannot_be_written_is_passed_over(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert ops.cache_folder((blocked / "below", tmp_path / "good")).startswith(str(tmp_path / "good"))
    assert Path(ops.cache_folder((blocked / "below",))).is_dir()


def test_an_edit_makes_a_new_folder_and_clears_the_old(tmp_path, monkeypatch):
    first = ops.cache_folder((tmp_path,))
    copy = tmp_path / "ops"
    shutil.copytree(ops.HERE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(ops, "HERE", copy)
    assert ops.cache_folder((tmp_path,)) == first
    (copy / "quant.py").write_text((copy / "quant.py").read_text() + "\n")
    assert ops.cache_folder((tmp_path,)) != first and not Path(first).exists()


@pytest.mark.parametrize("edit", ["out[n, d] += x[n, d]", "out[n, d] += 2 * x[n, d]"])
def test_a_changed_kernel_computes_the_change(tmp_path, edit):
    """What a student does: change a kernel, run again."""
    package = Path(mesp_np.__file__).parent
    shutil.copytree(package, tmp_path / "mesp_np", ignore=shutil.ignore_patterns("__pycache__", "weights"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def run():
        done = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, env=environment,
                              cwd=tmp_path, check=True)
        return float(done.stdout)

    assert run() == 2.0
    file = tmp_path / "mesp_np" / "ops" / "residual.py"
    file.write_text(file.read_text().replace("out[n, d] += x[n, d]", edit))
    assert run() == (3.0 if "2 *" in edit else 2.0)
