"""What a person sees while training: a live display in a terminal, plain lines elsewhere.

    with make(console, live=True) as readout:
        readout.begin(engine, steps, budget_bytes)
        with readout.compiling():
            ...                           the first step
        readout.step(record)              after every step
        readout.evaluation(record)        after every evaluation
        readout.message("saved")          a line above the display

The live display is in `live.py`.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass

from rich.text import Text

from mesp_np.ledger import show_bytes

FADE = 0.9                              # what a step still counts for, in smoothed figures, one step later


def make(console, live, every=1):
    """The readout for a rich console: live if that is wanted and the terminal can show it.

    every  steps from one plain line to the next
    """
    able = console.is_terminal and not console.is_dumb_terminal and not console.options.ascii_only
    if live and able:
        from mesp_np.live import LiveReadout

        return LiveReadout(console)
    return PlainReadout(console, every)


def perplexity(loss):
    """exp(loss); infinite where that is beyond float64."""
    return math.inf if loss > 709 else math.exp(loss)


class Readout:
    """What both kinds know and do.  All methods are called from the training thread."""

    def __init__(self, console):
        self.console = console
        self.engine = None
        self.steps = 0
        self.budget_bytes = None
        self.pace = Pace()
        self.kernels = None                      # Kernels, while they are compiled

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def message(self, text):
        """A line of its own, a string or rich Text, above the display if there is one."""
        self.console.print(Text().append(text), soft_wrap=True)

    def begin(self, engine, steps, budget_bytes=None):
        """Show this engine from now on.

        steps         number of the last step
        budget_bytes  what the run may take, or None
        """
        self.steps, self.budget_bytes = steps, budget_bytes
        self.engine = engine

    @contextmanager
    def compiling(self):
        """Show how many kernels have been compiled, for the length of a `with` block."""
        from mesp_np.ops.compiling import Kernels

        self.kernels = kernels = Kernels(self._compiling_began)
        try:
            with kernels.listening():
                yield
        finally:
            self.kernels = None
        if kernels.count:
            self.message(f"compiled {kernels.count} kernels in {kernels.seconds:.1f} s")

    def step(self, record):
        """A step is done.

        record  step, loss, lr, grad_norm, trained_tokens, seconds, live_peak_bytes, extent_bytes, os_growth_bytes,
                resident_bytes
        """
        self.pace = self.pace.after(record["trained_tokens"], record["seconds"])

    def evaluation(self, record):
        """An evaluation is done.

        record  step, valid_loss, valid_perplexity
        """

    def _compiling_began(self):
        """The first kernel is about to be compiled."""


class PlainReadout(Readout):
    """One line every `every` steps, and at the last, written out at once."""

    def __init__(self, console, every=1):
        super().__init__(console)
        self.every = every

    def begin(self, engine, steps, budget_bytes=None):
        super().begin(engine, steps, budget_bytes)
        budget = f", budget {show_bytes(budget_bytes)}" if budget_bytes else ""
        self.message(f"{steps} steps, method {engine.method.name}, arena {show_bytes(engine.arena.capacity)}{budget}")

    def step(self, record):
        super().step(record)
        if record["step"] % self.every == 0 or record["step"] == self.steps:
            self.message(f"{self._number(record)}  loss {record['loss']:.4f}  lr {record['lr']:.2e}"
                         f"  grad norm {record['grad_norm']:.4f}  {self.pace.tokens_per_second:.0f} tok/s"
                         f"  live peak {show_bytes(record['live_peak_bytes'])}")

    def evaluation(self, record):
        self.message(f"{self._number(record)}  valid loss {record['valid_loss']:.4f}"
                     f"  perplexity {record['valid_perplexity']:.4g}")

    def _number(self, record):
        return f"step {record['step']:>{len(str(self.steps))}}/{self.steps}"

    def _compiling_began(self):
        self.message("compiling kernels (first run only)")


@dataclass(frozen=True)
class Pace:
    """Sums over the steps so far, the older ones fading, for smoothed speeds.

    The first step also compiles: the second takes its place.
    """

    samples: int = 0
    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def after(self, tokens, seconds):
        """The pace after one more step, of so many trained tokens and seconds."""
        fade = FADE if self.samples > 1 else 0.0
        return Pace(self.samples + 1, fade * self.steps + 1, fade * self.tokens + tokens, fade * self.seconds + seconds)

    @property
    def tokens_per_second(self):
        """Trained tokens in a second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def seconds_per_step(self):
        """Seconds of a step."""
        return self.seconds / max(self.steps, 1)
