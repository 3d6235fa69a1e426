"""What the machine has room for: memory that can still be taken, and whether a folder is on a disk.

Free memory is what the system says can be taken without swapping (MemAvailable in proc(5); elsewhere
psutil has it), or less where this process may not have all of it: in a container (cgroup v2), or
under `ulimit -v`.
"""

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from mesp_np.process import STATUS

MEMINFO, MOUNTS, CGROUP = Path("/proc/meminfo"), Path("/proc/mounts"), Path("/sys/fs/cgroup")
IN_MEMORY = ("tmpfs", "ramfs")


def free_memory():
    """Bytes that this process can take now."""
    rooms = [_kib(MEMINFO, "MemAvailable") if MEMINFO.exists() else _available_elsewhere()]
    with suppress(OSError, ValueError):                    # no such file, or the word `max`: no limit
        rooms.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    with suppress(ImportError, OSError):                   # not on Windows; no /proc
        import resource
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            rooms.append(limit - _kib(STATUS, "VmSize"))
    return max(0, min(rooms))


def spare_disk():
    """Bytes free where temporary files go; 0 where these are kept in memory."""
    folder = Path(tempfile.gettempdir()).resolve()
    lines = [line.split() for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
    kinds = {Path(place): kind for _, place, kind, *_ in lines}
    mount = next((path for path in (folder, *folder.parents) if path in kinds), None)
    return 0 if kinds.get(mount) in IN_MEMORY else shutil.disk_usage(folder).free


def _kib(file, name):
    """Bytes from a line `NAME:  1234 kB`."""
    return int(re.search(rf"^{name}:\s+(\d+) kB$", file.read_text(), re.M)[1]) * 1024


def _available_elsewhere():
    import psutil

    return psutil.virtual_memory().available
