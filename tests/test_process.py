"""The system's count of this process: it grows by what is touched, and a file's pages are not the process's own."""

import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mesp_np import process
from mesp_np.ops.quant import Quantised
from mesp_np.process import memory, trim, weight_pages

MIB = 1 << 20
SLACK = 2 * MIB

on_linux = pytest.mark.skipif(not process.SMAPS.exists(), reason="reads /proc")


def mapped(path, size):
    """A new file of so many bytes, mapped and read-only, none of it read yet."""
    path.write_bytes(bytes(size))
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


@on_linux
def test_memory_is_what_was_touched_and_not_what_was_asked_for():
    before = memory()
    buffer = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert abs(memory().anonymous - before.anonymous) < SLACK
    np.frombuffer(buffer, np.uint8)[:32 * MIB] = 1
    now = memory()
    assert abs(now.anonymous - before.anonymous - 32 * MIB) < SLACK
    assert abs(now.resident - before.resident - 32 * MIB) < SLACK


@on_linux
def test_pages_of_weights_are_told_apart(tmp_path):
    """GIVEN two weights in one file, one of them quantised THEN what was read of the file counts, once."""
    size = 8 * MIB
    file, before = mapped(tmp_path / "weights", size), memory()
    codes = file[:MIB].view(np.uint32).reshape(512, 512)
    scales = file[MIB:MIB + 512 * 64 * 2].view(np.uint16).reshape(512, 64)
    weights = [file[size // 2:], Quantised(codes, scales, scales, 4)]
    assert weight_pages(weights) < size
    assert file.sum() == 0
    assert weight_pages(weights) == weight_pages(weights[:1]) == size
    now = memory()
    assert now.anonymous - before.anonymous < SLACK < now.resident - before.resident
    assert weight_pages([np.ones(size, np.uint8)]) == 0                   # no file backs it


@on_linux
def test_trimming_drops_the_compilers_pages_and_nothing_that_is_needed():
    code = """if True:
        import numpy as np
        from mesp_np.ops import load_compiler, rowmath
        from mesp_np.process import memory, trim

        load_compiler()
        kept, before = np.arange(1000.0), memory()
        trim()
        now = memory()
        assert rowmath.total(kept) == 999 * 500 and rowmath.largest(kept) == 999
        print(before.resident - now.resident, now.anonymous - before.anonymous)
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(process.__file__).parents[1])
    dropped, grown = map(int, done.stdout.split())
    assert dropped > 16 * MIB and grown < SLACK


@pytest.mark.parametrize("status", [None, "VmRSS: 12 kB\n"], ids=["another system", "an old Linux"])
def test_elsewhere_psutil_is_asked(monkeypatch, tmp_path, status):
    here = memory()
    monkeypatch.setattr(process, "STATUS", tmp_path / "status")
    if status:
        (tmp_path / "status").write_text(status)
    monkeypatch.setattr(process, "SMAPS", tmp_path / "none")
    found = memory()
    assert 0 < found.anonymous <= found.resident and abs(found.resident - here.resident) < 16 * MIB
    assert weight_pages([]) is None
    trim()
