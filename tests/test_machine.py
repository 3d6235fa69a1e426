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

    def say(available=8 * GIB, container=None, used=0, cached=0, address_space=resource.RLIM_INFINITY, taken=0,
            groups="0::/", at=""):
        names = ("memory.max", "memory.current", "inactive_file") if ":memory:" not in groups else (
            "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        (tmp_path / at).mkdir(parents=True, exist_ok=True)
        for name, text in (("meminfo", f"MemTotal: 99 kB\nMemAvailable:   {available // 1024} kB\n"),
                           ("status", f"VmSize:\t{taken // 1024} kB\n"), ("groups", groups + "\n"),
                           (f"{at}/{names[0]}", "max" if container is None else str(container)),
                           (f"{at}/{names[1]}", str(used)),
                           (f"{at}/memory.stat", f"anon 5\n{names[2]} {cached}\nfile 9\n")):
            (tmp_path / name.lstrip("/")).write_text(text)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (address_space, address_space))

    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "STATUS", tmp_path / "status")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    return say


@pytest.mark.parametrize("said, free", [
    ({}, 8 * GIB), ({"container": 3 * GIB, "used": GIB}, 2 * GIB), ({"container": 99 * GIB}, 8 * GIB),
    ({"address_space": 5 * GIB, "taken": GIB}, 4 * GIB), ({"container": GIB, "used": 2 * GIB}, 0),
    ({"container": 3 * GIB, "used": 3 * GIB, "cached": 2 * GIB}, 2 * GIB),
    ({"container": 3 * GIB, "used": GIB, "groups": "0::/a/b", "at": "a/b"}, 2 * GIB),
    ({"container": 3 * GIB, "used": GIB, "groups": "0::/a/b", "at": "a"}, 2 * GIB),
    ({"container": 3 * GIB, "used": GIB, "groups": "0::/a/b", "at": "c"}, 8 * GIB),
    ({"container": 3 * GIB, "used": GIB, "groups": "4:memory:/a", "at": "memory/a"}, 2 * GIB),
    ({"container": 3 * GIB, "used": GIB, "groups": "4:memory:/a", "at": "memory"}, 2 * GIB),
    ({"container": 6 * GIB, "address_space": 4 * GIB}, 4 * GIB)], ids=str)
def test_free_memory_is_the_least_of_what_may_be_taken(limits, said, free):
    limits(**said)
    assert machine.free_memory() == free


def test_free_memory_without_any_container(limits, tmp_path):
    limits()
    (tmp_path / "memory.max").unlink()
    assert machine.free_memory() == 8 * GIB


def test_what_the_system_does_not_say(limits, tmp_path, monkeypatch):
    limits()
    for name in ("meminfo", "status", "groups"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 12}))
    assert machine.free_memory() == 12


def test_without_a_folder_for_temporary_files_there_is_no_disk(monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(machine.tempfile, "gettempdir", none)
    assert machine.spare_disk() == 0


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
