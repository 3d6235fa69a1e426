"""What can be taken of the machine: the least of what the system, a container and a limit allow."""

import shutil
import sys

import pytest

from mesp_np import machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
GIB = 2 ** 30


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """A function that writes what the system would say."""
    resource = pytest.importorskip("resource")

    def say(available=8 * GIB, container=None, used=0, address_space=resource.RLIM_INFINITY, taken=0):
        for name, text in (("meminfo", f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\n"),
                           ("status", f"VmSize:\t{taken // 1024} kB\n"),
                           ("memory.max", "max" if container is None else str(container)),
                           ("memory.current", str(used))):
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (address_space, address_space))

    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "STATUS", tmp_path / "status")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    return say


@pytest.mark.parametrize("said, free", [
    ({}, 8 * GIB), ({"container": 3 * GIB, "used": GIB}, 2 * GIB), ({"container": 99 * GIB}, 8 * GIB),
    ({"address_space": 5 * GIB, "taken": GIB}, 4 * GIB), ({"container": GIB, "used": 2 * GIB}, 0),
    ({"container": 6 * GIB, "address_space": 4 * GIB}, 4 * GIB)], ids=str)
def test_free_memory_is_the_least_of_what_may_be_taken(limits, said, free):
    limits(**said)
    assert machine.free_memory() == free


def test_free_memory_without_any_container(limits, tmp_path):
    limits()
    (tmp_path / "memory.max").unlink()
    assert machine.free_memory() == 8 * GIB


def test_free_memory_of_this_machine():
    total = machine._kib(machine.MEMINFO, "MemTotal")
    assert 0 < machine.free_memory() < total


@pytest.mark.parametrize("kind, on_disk", [("ext4", True), ("tmpfs", False), ("ramfs", False), (None, True)])
def test_a_folder_in_memory_is_no_disk(tmp_path, monkeypatch, kind, on_disk):
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\n" + (f"b {tmp_path} {kind} rw 0 0\n" if kind else ""))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(machine, "MOUNTS", mounts)
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 12}))
    assert machine.spare_disk() == (12 if on_disk else 0)
