"""A system in a process of its own, which answers questions in lines of JSON: both ends of the pipe.

The driver's end    worker = Worker(python, "benchmarks.pytorch", spec, log)
                    loss = worker.ask("step", variant)       and worker.seconds, what that took
The system's end    serve(PyTorch)

A process waits on its pipe while another works, so that no two are busy at once.  What a library prints goes to
the log.  The process ends when its pipe is closed.
"""

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

TOOLS = Path(__file__).parents[1]
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Failed(Exception):
    """A system that cannot be started, or not do what it was asked for; the text is its reason."""


class Worker:
    """The driver's end.

    python  the interpreter
    module  dotted name of the one that serves the system
    spec    path of a JSON file that the system is made from
    log     path of what the process prints
    """

    def __init__(self, python, module, spec, log):
        self.log = log
        path = os.pathsep.join([str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [str(python), "-m", module, str(spec)], env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.about = self._answer()

    def ask(self, call, *args):
        """What the system's method returns.  Raises Failed."""
        with suppress(BrokenPipeError):                  # it has ended, as the answer will tell
            print(json.dumps([call, *args]), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self):
        """End the process."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise Failed(self._last_words(self.process.wait()))
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        self.seconds = answer["seconds"]
        return answer["result"]

    def _last_words(self, code):
        if code < 0:
            return f"ended by signal {-code}"            # by 9, when memory is short
        lines = [line.strip() for line in self.log.read_text().split("\n") if line.strip()]
        return lines[-1] if lines else f"exit code {code}"


def serve(system):
    """Make a system from the spec that the command line names, tell its `about`, and call the methods asked for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    made = system(spec)
    print(json.dumps({"result": made.about, "seconds": 0.0}), file=answers, flush=True)
    for line in sys.stdin:
        call, *args = json.loads(line)
        began = time.perf_counter()
        try:
            answer = {"result": getattr(made, call)(*args), "seconds": time.perf_counter() - began}
        except Exception as error:                       # told to the driver, which goes on with the others
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def resident_growth(action):
    """Bytes by which the process's resident set grows to its high-water mark within action(); None but on Linux.

    The C library gives back what is free before, so that what was left there counts as new.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        RESET.write_text("5")                            # the high-water mark starts anew
        before = _resident("VmRSS")
    except (AttributeError, OSError):
        action()
        return None
    action()
    return _resident("VmHWM") - before


def _resident(field):
    """One of this process's sizes, which Linux states in kB."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", STATUS.read_text())[1])
