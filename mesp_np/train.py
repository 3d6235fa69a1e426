"""The training loop: batches in, an adapter and a log out.

    RUN_DIR/config.json    every setting of the run
    RUN_DIR/log.jsonl      a line a step, exact integers
    RUN_DIR/summary.json   validation before and after
    RUN_DIR/adapter/       the adapter in PEFT's format (model/ when every weight is trained)

Every shape of batch that will occur is planned before the first step, so the arena is as
large as the largest needs, and a budget that is too small is refused before any work.
"""

import json
import math
import signal
import time
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from mesp_np.checkpoint import adapter, folder
from mesp_np.config import RunConfig
from mesp_np.engine import Engine, plan_loss, plan_step
from mesp_np.errors import UsageError, UserError
from mesp_np.generate import Generator, generate
from mesp_np.json_file import write_object
from mesp_np.ledger import show_bytes
from mesp_np.optim import learning_rate
from mesp_np.readout import perplexity


@dataclass(frozen=True)
class TrainConfig:
    """What the loop does around the steps."""

    iters: int = 0                   # steps; 0: as many as `epochs` are
    epochs: float = 0.0              # passes over the rows; 0: iters decides
    lr: float = 1e-3
    schedule: str = "cosine"         # or constant, linear
    warmup: int = 10
    eval_every: int = 50             # steps between validations; 0: only before and after
    save_every: int = 0              # steps between saved adapters; 0: only at the end
    prompt: str = ""                 # text to continue before and after; "": none
    sample_tokens: int = 80
    memory_budget: int = 0           # bytes; 0: none

    def __post_init__(self):
        if self.schedule not in ("constant", "linear", "cosine"):
            raise UsageError(f"--schedule is {self.schedule!r}", "choose from constant, linear, cosine")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"--lr is {self.lr}", "it must be a positive number")
        for name in ("iters", "epochs", "warmup", "eval_every", "save_every", "sample_tokens", "memory_budget"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}", "it must be 0 or more")
        if bool(self.iters) == bool(self.epochs):
            raise UsageError("give either --iters or --epochs", "one decides how long the run is")

    def steps(self, per_epoch):
        """Steps in the run, when an epoch has so many."""
        return self.iters or max(1, math.ceil(self.epochs * per_epoch))


class Run:
    """A training run: what is trained, on what, and where the results go.

    checkpoint  checkpoint.folder.Checkpoint
    train       data.batches.Batches
    valid       list of Batch, perhaps empty
    run_dir     folder that does not exist yet, or is empty
    """

    def __init__(self, checkpoint, run: RunConfig, config: TrainConfig, train, valid, run_dir, readout):
        self.checkpoint, self.run, self.config = checkpoint, run, config
        self.train, self.valid, self.readout = train, valid, readout
        self.run_dir = Path(run_dir)
        self.steps = config.steps(math.ceil(train.per_epoch / run.grad_accumulation))
        self.stopping = False

    def start(self, adapter_folder=None):
        """Train to the end (or to Ctrl-C) and save.  Returns the summary, as written."""
        plan = self._plan()
        self._refuse_beyond_budget(plan)
        self._make_run_dir()
        with Engine(self.checkpoint.config, self.checkpoint.weights, self.run, plan) as engine, self._interruptible():
            if adapter_folder:
                adapter.load(adapter_folder, engine.parameters, self.run)
            self.readout.begin(engine, self.steps, self.config.memory_budget)
            with self.readout.compiling():
                before = self._validate(engine, 0)
            summary = {"valid_loss_before": before, "sample_before": self._sample(engine)}
            with open(self.run_dir / "log.jsonl", "w", encoding="utf-8") as log:
                self._loop(engine, log)
            self._save(engine)
            summary |= {"valid_loss_after": self._validate(engine, engine.steps), "sample_after": self._sample(engine),
                        "steps": engine.steps, "interrupted": self.stopping}
            write_object(self.run_dir / "summary.json", summary)
        return summary

    def _loop(self, engine, log):
        for step in range(1, self.steps + 1):
            with self.readout.compiling() if step == 1 else nullcontext():
                record = self._step(engine, step)
            every = self.config.eval_every
            if every and step % every == 0 and step < self.steps:
                record["valid_loss"] = self._validate(engine, step)
            log.write(json.dumps(record) + "\n")
            log.flush()
            if self.stopping:
                return
            if self.config.save_every and step % self.config.save_every == 0:
                self._save(engine)

    def _step(self, engine, step):
        began, k = time.perf_counter(), self.run.grad_accumulation
        rate = learning_rate(step, self.steps, self.config.lr, self.config.schedule, self.config.warmup)
        result = engine.step([self.train.batch((step - 1) * k + i) for i in range(k)], rate)
        if not math.isfinite(result.loss + result.grad_norm):
            raise UserError(f"step {step}: loss is {result.loss}, gradient norm {result.grad_norm}",
                            "nothing was saved after it; try a smaller --lr or --clip 1")
        record = {"step": step, "loss": result.loss, "lr": rate, "grad_norm": result.grad_norm,
                  "trained_tokens": result.trained_tokens, "live_peak_bytes": engine.arena.ledger.live_peak,
                  "extent_bytes": engine.arena.extent, "seconds": time.perf_counter() - began}
        self.readout.step(record)
        return record

    def _validate(self, engine, step):
        """Mean loss per token on the validation rows, or None."""
        if not self.valid:
            return None
        tokens = sum(batch.trained_tokens for batch in self.valid)
        loss = sum(engine.loss(batch) * batch.trained_tokens for batch in self.valid) / tokens
        self.readout.evaluation({"step": step, "valid_loss": loss, "valid_perplexity": perplexity(loss)})
        return loss

    def _sample(self, engine):
        """The likeliest continuation of the prompt, or None."""
        config, tokenizer = self.config, self.checkpoint.tokenizer
        if not config.prompt:
            return None
        ids = tokenizer.encode(config.prompt)
        generator = Generator(engine.config, engine.model.params, engine.team, engine.arena.dtype,
                              len(ids) + config.sample_tokens)
        new = generate(generator, ids, config.sample_tokens, self.checkpoint.eos_ids | {tokenizer.eos_id})
        return config.prompt + tokenizer.decode(list(new))

    def _save(self, engine):
        if self.run.trainable == "full":
            folder.save(self.run_dir / "model", engine.config, {p.name: p.value for p in engine.parameters},
                        self.checkpoint.folder)
        else:
            adapter.save(self.run_dir / "adapter", engine.parameters, self.run, self.checkpoint.folder)

    def _plan(self):
        """Extent in bytes that every batch of the run fits in."""
        config, weights = self.checkpoint.config, self.checkpoint.weights
        shapes = self.train.shapes(range(self.steps * self.run.grad_accumulation))
        extents = [plan_step(config, self.run, shape, weights).extent_bytes for shape in shapes]
        extents += [plan_loss(config, self.run, shape, weights) for shape in {batch.ids.shape for batch in self.valid}]
        return max(extents)

    def _refuse_beyond_budget(self, extent):
        budget = self.config.memory_budget
        if budget and extent > budget:
            raise UserError(f"--memory-budget is {show_bytes(budget)}, this run needs {show_bytes(extent)}",
                            "try --loss vocab, --update fused, a smaller --batch-size or --seq, or mesp-lean")

    def _make_run_dir(self):
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if any(self.run_dir.iterdir()):
                raise UserError(f"{self.run_dir}: is not empty", "name another --run-dir")
        except OSError as error:
            raise UserError(f"{self.run_dir}: cannot be made ({error.strerror})", "name another --run-dir") from None
        settings = asdict(self.run) | asdict(self.config) | {"model": str(self.checkpoint.folder), "steps": self.steps}
        write_object(self.run_dir / "config.json", settings)

    @contextmanager
    def _interruptible(self):
        """The first Ctrl-C ends the run after its step; the second ends it at once."""
        def stop(*_):
            self.stopping = True
            signal.signal(signal.SIGINT, before)
            self.readout.message("stopping after this step; Ctrl-C again stops at once")

        before = signal.signal(signal.SIGINT, stop)
        yield
        signal.signal(signal.SIGINT, before)
