"""What the machine has room for: memory that can still be taken, and whether a folder is on a disk.

Free memory is what the system says can be taken without swapping (MemAvailable in proc(5); where that is
not said, psutil has it), or less where this process may not have all of it: in a container (cgroups, v2 or
v1), or under `ulimit -v`.  What a container has used counts without the pages of files that the system would
drop for us.
"""

import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from mesp_np.process import STATUS

MEMINFO, MOUNTS = Path("/proc/meminfo"), Path("/proc/mounts")
GROUPS, CGROUP = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
IN_MEMORY = ("tmpfs", "ramfs")


def free_memory():
    """Bytes that this process can take now."""
    rooms = [_kib(MEMINFO, "MemAvailable") or _available_elsewhere(), *_rooms_of_groups()]
    with suppress(ImportError, OSError):                   # not on Windows
        import resource
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            rooms.append(limit - (_kib(STATUS, "VmSize") or 0))
    return max(0, min(rooms))


def spare_disk():
    """Bytes free where temporary files go; 0 where these are kept in memory, or cannot be."""
    try:
        folder = Path(tempfile.gettempdir()).resolve()
        lines = [line.split() for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
        kinds = {Path(place): kind for _, place, kind, *_ in lines}
        mount = next((path for path in (folder, *folder.parents) if path in kinds), None)
        return 0 if kinds.get(mount) in IN_MEMORY else shutil.disk_usage(folder).free
    except OSError:                                        # no folder is fit for temporary files
        return 0


def _rooms_of_groups():
    """Bytes left in each control group that limits this process: its own, and those around it."""
    for folder, limit, used, dropped in _groups():
        with suppress(OSError, ValueError, TypeError):     # not there, or the word `max`: no limit
            cached = re.search(rf"^{dropped} (\d+)$", (folder / "memory.stat").read_text(), re.M)[1]
            yield int((folder / limit).read_text()) - int((folder / used).read_text()) + int(cached)


def _groups():
    """(folder, and the names in it of the limit, of what is used, of the files' pages), as in cgroups(7)."""
    with suppress(OSError):                                # not on this system
        for line in GROUPS.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                top, names = (CGROUP, ("memory.max", "memory.current", "inactive_file")) if not kinds else (
                    CGROUP / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
                own = top / path.lstrip("/")
                yield from ((folder, *names) for folder in (own, *own.parents) if folder.is_relative_to(top))


def _kib(file, name):
    """Bytes from a line `NAME:  1234 kB`; None where there is none."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", file.read_text(), re.M) if file.exists() else None
    return found and int(found[1]) * 1024


def _available_elsewhere():
    import psutil

    return psutil.virtual_memory().available
