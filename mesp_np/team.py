"""The worker team: the only place that starts threads, and the gate in front of all work.

OpenBLAS runs with one thread per call; the team's workers run *tiles*, pieces of an
op that write to disjoint parts of its output.  NumPy's matmul and Numba's nogil
kernels both release the interpreter lock, so tiles run side by side.  What a tile is
depends on shapes alone, never on the number of workers: results have the same bits
for any number of threads.

An output that is not writeable is a phantom (`arena.py`): its work is counted in
FLOPs and not done.  That one test is all there is to planning.
"""

import queue
import threading
from collections import Counter
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

CHUNK = 32768           # elements in a row range: long enough to be worth a call


class Team:
    """A caller and `threads - 1` helpers.

    flops  Counter of FLOPs by phase: forward, recompute, backward, update
    phase  what the work done now is counted as
    compute  "full", or "bf16": the inputs of large products are rounded (`ops/bf16.py`)
    """

    def __init__(self, threads=1, compute="full"):
        self.threads, self.compute = threads, compute
        self.flops = Counter()
        self.phase = "forward"
        self.weight_tile = None          # (threads, elements): set by `matmul.lend`
        _blas.enter()
        self._done = threading.Semaphore(0)
        self._inboxes = [queue.SimpleQueue() for _ in range(threads - 1)]
        for worker, inbox in enumerate(self._inboxes, start=1):
            threading.Thread(target=self._help, args=(worker, inbox), daemon=True).start()

    def close(self):
        """Let the helpers go; with the last team, BLAS gets its threads back."""
        if self.threads:
            for inbox in self._inboxes:
                inbox.put(None)
            self.threads, self._inboxes = 0, []
            _blas.leave()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @contextmanager
    def counting(self, phase):
        """Count the work inside as `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def run(self, out, tiles, task, flops):
        """task(worker, tile) for every tile in range(tiles), unless `out` is a phantom.

        Tiles are taken in order by whoever is free; each must write only to its own part.
        """
        self.flops[self.phase] += flops
        if not out.flags.writeable:
            return
        helpers = self._inboxes[:tiles - 1]
        if not helpers:
            for tile in range(tiles):
                task(0, tile)
            return
        job = _Job(task, tiles)
        for inbox in helpers:
            inbox.put(job)
        try:
            job.work(0)
        finally:
            for _ in helpers:
                self._done.acquire()
        if job.error:
            raise job.error

    def rows(self, kernel, out, *args, width=None, flops):
        """kernel(out, *args, start, stop) over ranges of out's first axis.

        width  elements of work in a row, when it is not the row's own size
        flops  per element of that width
        """
        rows = out.shape[0]
        width = max(1, width or out.size // max(rows, 1))
        step = max(1, CHUNK // width)

        def task(_, tile):
            kernel(out, *args, tile * step, min(rows, (tile + 1) * step))

        self.run(out, -(-rows // step), task, flops * rows * width)

    def _help(self, worker, inbox):
        for job in iter(inbox.get, None):
            job.work(worker)
            self._done.release()


class _SingleThreadedBlas:
    """BLAS works with one thread a call for as long as any team is there."""

    def __init__(self):
        self._teams, self._limits, self._lock = 0, None, threading.Lock()

    def enter(self):
        with self._lock:
            limits = threadpool_limits(limits=1, user_api="blas")
            self._limits = self._limits if self._teams else limits       # the first remembers what was before
            self._teams += 1

    def leave(self):
        with self._lock:
            self._teams -= 1
            if not self._teams:
                self._limits.restore_original_limits()


_blas = _SingleThreadedBlas()


class _Job:
    """Tiles handed out one by one; next() on a shared range iterator is atomic under the interpreter lock."""

    def __init__(self, task, tiles):
        self._task = task
        self._tiles = iter(range(tiles))
        self.error = None

    def work(self, worker):
        try:
            for tile in self._tiles:
                self._task(worker, tile)
        except BaseException as error:      # carried to the caller's thread
            self.error = error
