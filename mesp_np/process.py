"""This process: what the operating system says it takes, to stand beside what the arena says; and its collector.

    resident    all of its pages that are in memory: interpreter, libraries and mapped weights included
    anonymous   those of them that no file backs: what was allocated, the arena included
    weights     those of the mapped weight files, which the system may drop and read again

On Linux the first two stand in /proc/self/status (since 4.5), and a page of files is told apart by the address of
its mapping in /proc/self/smaps (proc(5)).  Elsewhere psutil has the resident pages and, in place of the
anonymous ones, those that no other process shares; pages of weights are not told apart there.
"""

import ctypes
import gc
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from mesp_np.ops.quant import Quantised

STATUS, SMAPS = Path("/proc/self/status"), Path("/proc/self/smaps")
MADV_DONTNEED = 4               # the same on every architecture of Linux


class Memory(NamedTuple):
    """Bytes of this process in memory."""

    resident: int
    anonymous: int


def memory():
    """Memory of this process now; the system counts to within some pages a thread."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", STATUS.read_text(), re.M)) if STATUS.exists() else {}
    if "RssAnon" not in kib:
        return _memory_elsewhere()
    return Memory(int(kib["VmRSS"]) * 1024, int(kib["RssAnon"]) * 1024)


def weight_pages(weights):
    """Resident bytes of the files that `weights` (stored arrays or Quantised) are mapped from; None if not known."""
    if not SMAPS.exists():
        return None
    addresses = [part.__array_interface__["data"][0] for stored in weights for part in _parts(stored)]
    return sum(found.resident - found.anonymous for found in _mappings()
               if any(found.first <= address < found.last for address in addresses))


def trim():
    """Give back what only the start needed: free heap, and pages of libraries, above all the compiler's.

    A page of a file that was only read is the same when it is read again, so it is dropped without loss and comes
    back with its next use.  Where the system is not Linux nothing happens.
    """
    if not SMAPS.exists():
        return
    libc = ctypes.CDLL(None)
    with suppress(AttributeError):                      # a C library without it
        libc.malloc_trim(0)
    for found in _mappings():
        if found.resident and not found.anonymous and "w" not in found.permissions and ".so" in found.file:
            libc.madvise(ctypes.c_void_p(found.first), ctypes.c_size_t(found.last - found.first), MADV_DONTNEED)


class _Mapping(NamedTuple):
    """A range of addresses, first to last - 1; `file` is empty where it is of no file."""

    first: int
    last: int
    permissions: str
    file: str
    resident: int
    anonymous: int


def _mappings():
    """Every _Mapping of the process."""
    for text in re.split(r"^(?=\w+-\w+ )", SMAPS.read_text(), flags=re.M)[1:]:
        place, permissions, _, _, _, *file = text.splitlines()[0].split(maxsplit=5)
        first, last = (int(address, 16) for address in place.split("-"))
        resident, anonymous = (int(re.search(rf"^{name}: +(\d+) kB$", text, re.M)[1]) * 1024
                               for name in ("Rss", "Anonymous"))
        yield _Mapping(first, last, permissions, Path(*file).name, resident, anonymous)


def _parts(stored):
    return (stored.codes, stored.scales, stored.biases) if isinstance(stored, Quantised) else (stored,)


def _memory_elsewhere():
    import psutil

    found = psutil.Process().memory_full_info()
    return Memory(found.rss, found.uss)


@contextmanager
def collector_paused():
    """Python's collector of cycles waits: within a step it would walk through all objects of the process."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
