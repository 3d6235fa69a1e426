"""The training loop: batches in, an adapter and a log out.

    RUN_DIR/config.json    every setting of the run
    RUN_DIR/log.jsonl      a line a step, exact integers
    RUN_DIR/summary.json   validation and sample before and after, and what the process took
    RUN_DIR/adapter/       the adapter in PEFT's format (model/, in float32, when every weight is trained)

Every shape of batch that can occur is planned before the first step, so the arena is as
large as the largest needs, and a budget that is too small is refused before any work.  Before
that the planner may choose what is fastest within the budget, by the largest batch (`choose`).

Beside the arena's bytes the log has the system's (`process.py`): resident_bytes of the whole process,
and os_growth_bytes, its anonymous memory beyond what it had before the engine was made.  That is the
extent, and some megabytes of compiled kernels and of lists; in a run that compiles, also what the
compiler does not give back.
"""

import math
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mesp_np import __version__, planner
from mesp_np.checkpoint import adapter, folder
from mesp_np.checkpoint.atomic import new_file, reported
from mesp_np.engine import Engine, plan_loss, plan_step
from mesp_np.errors import UserError
from mesp_np.evaluate import evaluate
from mesp_np.generate import generate, generator, memory_needed, pieces
from mesp_np.interrupt import gently
from mesp_np.json_file import dumps, object_bytes
from mesp_np.ledger import show_bytes
from mesp_np.ops import load_compiler
from mesp_np.optim import learning_rate
from mesp_np.process import memory, trim, weight_pages
from mesp_np.readout import perplexity
from mesp_np.saved import tiles

LARGEST = float(np.finfo(np.float32).max)
DIVERGED = "nothing was saved from there on; try a smaller --lr or --clip 1"


class Stopped(Exception):
    """Ctrl-C, within what can be left out."""


class Run:
    """A training run: what is trained, on what, and where the results go.

    checkpoint  checkpoint.folder.Checkpoint
    train       data.batches.Batches
    valid       data.batches.InOrder, perhaps empty
    run_dir     folder that does not exist yet, or is empty
    adapter     folder of the adapter to start from, or None
    origin      what else config.json is to say, such as where the data came from
    prompt_ids  the tokens of config.prompt, when they are not those of a plain text
    """

    def __init__(self, checkpoint, run, config, train, valid, run_dir, readout, adapter=None, origin=(),
                 prompt_ids=None):
        self.checkpoint, self.run, self.config = checkpoint, run, config
        self.train, self.valid, self.readout = train, valid, readout
        self.run_dir, self.adapter, self.origin = Path(run_dir), adapter, dict(origin)
        self.prompt_ids = checkpoint.tokenizer.encode(config.prompt) if prompt_ids is None else prompt_ids
        self.steps = config.steps(math.ceil(train.per_epoch / run.grad_accumulation))
        self.stopping = False

    def start(self):
        """Train to the end (or to Ctrl-C) and save.  Returns the summary, as written.

        Raises UserError, and leaves no folder behind, for what is wrong before the first step.
        """
        extent = self._plan()
        load_compiler()
        self.anonymous_before = memory().anonymous
        with self._new_run_dir(), self._engine(extent) as engine, gently(self._stop):
            engine.reserve(math.prod(_most_rows(self._shapes())))
            if self.adapter:
                adapter.load(self.adapter, engine.parameters, self.run)
            self.readout.begin(engine, self.steps, self.config.memory_budget)
            with self.readout.compiling():
                summary = self._judge(engine, "before")
            if self.stopping:
                raise KeyboardInterrupt                    # nothing is trained yet
            summary |= self._loop(engine)
            summary["weight_resident_bytes"] = weight_pages(self.checkpoint.weights.values())
            self._save(engine)
            summary |= self._judge(engine, "after") | {"steps": engine.steps, "interrupted": self.stopping}
            self._write("summary.json", summary)
        return summary

    def _engine(self, capacity):
        return Engine(self.checkpoint.config, self.checkpoint.weights, self.run, capacity)

    def _loop(self, engine):
        """All steps, or those up to Ctrl-C; the most that one of them took, in bytes by name."""
        every, save_every, most = self.config.eval_every, self.config.save_every, {}
        for step in range(1, self.steps + 1):
            with self.readout.compiling() if step == 1 else nullcontext():
                record = self._step(engine, step)
            if every and step % every == 0 and step < self.steps:
                with suppress(Stopped):
                    record |= self._validate(engine)
            self._log(engine, record)
            most |= {name: max(size, most.get(name, size)) for name, size in record.items() if name.endswith("_bytes")}
            if self.stopping:
                break
            if save_every and step % save_every == 0:
                self._save(engine)
        return most

    def _log(self, engine, record):
        """Append a line.  When that fails, the run ends, and what it has trained is saved if that can be."""
        path = self.run_dir / "log.jsonl"
        try:
            with reported(path, "its last line may be cut off"), open(path, "a", encoding="utf-8") as log:
                log.write(dumps(record) + "\n")
        except UserError:
            with suppress(UserError):
                self._save(engine)
                self.readout.message(f"saved after step {engine.steps}")
            raise

    def _step(self, engine, step):
        began, k = time.perf_counter(), self.run.grad_accumulation
        rate = learning_rate(step, self.steps, self.config.lr, self.config.schedule, self.config.warmup)
        result = engine.step([self.train.batch((step - 1) * k + i) for i in range(k)], rate)
        if not math.isfinite(result.loss + result.grad_norm):
            raise UserError(f"step {step}: loss is {result.loss}, gradient norm {result.grad_norm}",
                            DIVERGED)
        record = {"step": step, "loss": result.loss, "lr": rate, "grad_norm": result.grad_norm,
                  "trained_tokens": result.trained_tokens, "seconds": time.perf_counter() - began}
        if step == 1:
            trim()                                         # the compiler's pages, now that all kernels are there
        record |= self._bytes(engine)
        self.readout.step(record)
        return record

    def _bytes(self, engine):
        """What the step that was just done took, by the ledger and by the system."""
        now = memory()
        return {"live_peak_bytes": engine.arena.ledger.live_peak, "extent_bytes": engine.arena.extent,
                "os_growth_bytes": now.anonymous - self.anonymous_before, "resident_bytes": now.resident}

    def _validate(self, engine):
        """Mean loss per token on the validation rows, and its perplexity; nothing without such rows.

        Raises Stopped, or UserError when the loss is not a number.
        """
        if not self.valid:
            return {}
        loss = evaluate(engine, self._unless_stopped(self.valid)).loss
        found = {"valid_loss": loss, "valid_perplexity": perplexity(loss)}
        self.readout.evaluation({"step": engine.steps} | found)
        return found

    def _judge(self, engine, when):
        """Validation and sample, named for the summary; None where Ctrl-C came first."""
        found = dict.fromkeys(("valid_loss", "valid_perplexity", "sample"))
        with suppress(Stopped):
            found |= self._validate(engine)
            found["sample"] = self._sample(engine)
        return {f"{name}_{when}": value for name, value in found.items()}

    def _sample(self, engine):
        """The likeliest continuation of the prompt, or None.  Raises Stopped."""
        tokenizer, ids = self.checkpoint.tokenizer, self._prompt_ids()
        if not ids:
            return None
        source = generator(engine, len(ids) + self.config.sample_tokens)
        new = generate(source, ids, self.config.sample_tokens, self.checkpoint.eos_ids | {tokenizer.eos_id})
        return self.config.prompt + "".join(pieces(self._unless_stopped(new), tokenizer, ids[-1:]))

    def _prompt_ids(self):
        return self.prompt_ids if self.config.sample_tokens else []

    def _unless_stopped(self, items):
        """Each of the items; from Ctrl-C on Stopped is raised in place of the next."""
        items = iter(items)
        while not self.stopping:
            try:
                yield next(items)
            except StopIteration:
                return
        raise Stopped

    def _save(self, engine):
        self._refuse_diverged(engine)
        if self.run.trainable == "full":
            weights = {p.name: p.value for p in engine.parameters}
            folder.save(self.run_dir / "model", engine.config, weights, self.checkpoint.folder, dtype="f32")
        else:
            adapter.save(self.run_dir / "adapter", engine.parameters, self.run, self.checkpoint.name)

    def _refuse_diverged(self, engine):
        """Raise UserError when a trained number does not fit float32, or the last batch has no finite loss now."""
        for p in engine.parameters:
            if not -LARGEST <= p.value.min() <= p.value.max() <= LARGEST:              # nor when one is NaN
                raise UserError(f"step {engine.steps}: not all of {p.name} is finite after it", DIVERGED)
        loss = engine.loss(self.train.batch(engine.steps * self.run.grad_accumulation - 1))
        if not math.isfinite(loss):
            raise UserError(f"step {engine.steps}: loss is {loss} after it", DIVERGED)

    def _write(self, name, value):
        with new_file(self.run_dir / name) as file:
            file.write(object_bytes(value))

    def choose(self, free):
        """Let the planner set the fields of the run that are named in `free`; returns its Choice."""
        choice = planner.choose(self.checkpoint.config, self.run, free, self._figures, self.config.memory_budget,
                                _most_rows(self._shapes()))
        self.run = choice.run
        self.origin["chosen"] = list(choice.free)
        return choice

    def _figures(self, run):
        """planner.Figures of a run: the most of its batches' bytes, and the FLOPs of the largest."""
        config, weights, shapes = self.checkpoint.config, self.checkpoint.weights, self._shapes()
        figures = {shape: planner.plan_figures(config, run, shape, weights) for shape in largest(shapes, run.row_tile)}
        extents = [found.extent_bytes for found in figures.values()]
        extents += [plan_loss(config, run, shape, weights)
                    for shape in set(largest(shapes | self.valid.shapes(), run.row_tile)) - shapes]
        return planner.Figures(max(extents), max(found.live_peak_bytes for found in figures.values()),
                               figures[_most_rows(shapes)].flops, self._sample_bytes(run))

    def _shapes(self):
        """Every shape (B, T) that a batch to train on may have."""
        count = self.steps * self.run.grad_accumulation
        if count <= self.train.per_epoch:
            return set(self.train.shapes(range(count)))
        return self.train.possible_shapes()

    def _sample_bytes(self, run):
        """What the samples take, beside the engine's arena."""
        ids = self._prompt_ids()
        with Engine(self.checkpoint.config, self.checkpoint.weights, run) as phantom:
            return memory_needed(phantom, len(ids) + self.config.sample_tokens) if ids else 0

    def _plan(self):
        """Extent in bytes that every batch of the run fits in.  Raises UserError when it is beyond the budget."""
        config, weights, budget = self.checkpoint.config, self.checkpoint.weights, self.config.memory_budget
        shapes = self._shapes()
        extents = [plan_step(config, self.run, shape, weights).extent_bytes for shape in shapes]
        extents += [plan_loss(config, self.run, shape, weights) for shape in shapes | self.valid.shapes()]
        sampling = self._sample_bytes(self.run)
        if budget and max(extents) + sampling > budget:
            raise UserError(f"--memory-budget is {show_bytes(budget)}, this run needs {show_bytes(max(extents))} and "
                            f"{show_bytes(sampling)} for the samples before and after",
                            "raise it, leave out --method or --plan, or make --batch-size, --seq or "
                            "--sample-tokens smaller")
        return max(extents)

    @contextmanager
    def _new_run_dir(self):
        """The run's folder with its config.json; removed again when the run fails with nothing logged or saved."""
        made = [path for path in (self.run_dir, *self.run_dir.parents) if not path.exists()]
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if any(self.run_dir.iterdir()):
                raise UserError(f"{self.run_dir}: is not empty", "name another --run-dir")
        except OSError as error:
            raise UserError(f"{self.run_dir}: cannot be made ({error.strerror})", "name another --run-dir") from None
        settings = asdict(self.run) | asdict(self.config) | self.origin
        try:
            self._write("config.json", settings | {"model": str(self.checkpoint.folder), "adapter": self.adapter,
                                                   "steps": self.steps, "version": __version__})
            yield
        except BaseException:
            found = list(self.run_dir.iterdir())
            if not any(path.is_dir() or path.name == "log.jsonl" and path.stat().st_size for path in found):
                for path in found:
                    path.unlink()
                for folder_made in made:
                    folder_made.rmdir()
            raise

    def _stop(self):
        self.stopping = True
        self.readout.message("stopping and saving; Ctrl-C again stops at once")


def _most_rows(shapes):
    """The shape (B, T) of most rows; of several, with the longest."""
    return max(shapes, key=lambda shape: (math.prod(shape), shape[1]))


def largest(shapes, row_tile):
    """The shapes (B, T) that may take the most bytes: no other has as many rows, as long, in tiles as large.

    Two rows of 144 are more than two of 128, and take less where a tile has 256: it holds one of them, not both.
    """
    sizes = {(B, T): (B * T, T, max(tile.rows.stop - tile.rows.start for tile in tiles(B, T, row_tile)))
             for B, T in shapes}
    return [shape for shape, size in sizes.items()
            if not any(other != size and all(its >= mine for its, mine in zip(other, size, strict=True))
                       for other in sizes.values())]
