"""What the training loop does around its steps; how a step is computed is a `config.RunConfig`."""

import math
from dataclasses import dataclass

from mesp_np.errors import UsageError
from mesp_np.optim import SCHEDULES

MOST = 10 ** 15                      # of anything that is counted: floats hold every whole number up to there


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run, rate, and what is done between steps."""

    iters: int = 0                   # steps; 0: as many as `epochs` are
    epochs: float = 0.0              # passes over the rows; 0: iters decides
    lr: float = 1e-3
    schedule: str = "cosine"         # or constant, linear
    warmup: int = 10
    eval_every: int = 50             # steps between validations; 0: only before and after
    eval_batches: int = 0            # of each validation, at most; 0: all
    save_every: int = 0              # steps between saved adapters; 0: only at the end
    prompt: str = ""                 # text to continue before and after; "": none
    sample_tokens: int = 80
    memory_budget: int = 0           # bytes; 0: no limit, and the planner takes half of the free memory

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise UsageError(f"--schedule is {self.schedule!r}", f"choose from {', '.join(SCHEDULES)}")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"--lr is {self.lr}", "it must be a positive number")
        for name in ("iters", "epochs", "warmup", "eval_every", "eval_batches", "save_every", "sample_tokens",
                     "memory_budget"):
            if not 0 <= getattr(self, name) <= MOST:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}", f"it must be 0 to {MOST:.0e}")
        if bool(self.iters) == bool(self.epochs):
            raise UsageError("give either --iters or --epochs", "one decides how long the run is")

    def steps(self, per_epoch):
        """Steps in the run, when an epoch has so many."""
        return self.iters or max(1, math.ceil(self.epochs * per_epoch))
