"""The engine: a model in an arena with a method, one step at a time; and the plan of a step.

    plan = plan_step(config, run)                      exact bytes, no memory, no weights
    engine = Engine(config, weights, run, plan.extent_bytes)
    result = engine.step([batch], rate=1e-4)
    engine.arena.ledger.live_peak == plan.live_peak_bytes

The plan *is* the run on a phantom arena: same code, same events.

Parts of the work that leave live what they found have their tensors placed as a whole
(`placement.py`): a phantom does such a part first, and every engine then follows its schedule.
"""

from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from mesp_np import methods
from mesp_np.arena import Arena
from mesp_np.batch import Batch
from mesp_np.methods import backprop, checkpoints, mezo
from mesp_np.model import Model
from mesp_np.ops import matmul
from mesp_np.ops.fill import fill
from mesp_np.ops.noise import key
from mesp_np.ops.optim_steps import add_squares
from mesp_np.optim import Optimizer, clip_factor
from mesp_np.params import build, phantom_weights, trainable
from mesp_np.placement import SCHEDULES, keep
from mesp_np.process import collector_paused
from mesp_np.team import Team


@dataclass(frozen=True)
class StepResult:
    """loss: mean per trained token of the window; grad_norm: global norm before clipping."""

    loss: float
    grad_norm: float
    trained_tokens: int


class Engine:
    """Everything a step needs.

    weights   checkpoint name -> stored array (`checkpoint.folder`, or `params.phantom_weights`)
    capacity  bytes of the arena, from a plan; None for a phantom
    """

    def __init__(self, config, weights, run, capacity=None, poison=False):
        self.config, self.run = config, run
        self.method = methods.find(run.method, run.keep)
        self.arena = Arena(capacity, np.dtype(run.dtype), poison)
        self.team = Team(run.threads, run.compute)
        with ExitStack() as undo:
            undo.callback(self.team.close)
            self._fill(weights)
            undo.pop_all()
        self.setup_events = self.arena.ledger.events
        self.arena.ledger.restart()

    def _fill(self, weights):
        """What lives as long as the engine: parameters, optimizer states, the workers' scratch, the model."""
        config, run = self.config, self.run
        self.checkpoints = checkpoints.STORES[run.checkpoint_store](self.arena, self.team)
        self.steps = 0
        params = build(self.arena, self.team, config, weights, run)
        self.parameters = trainable(params)
        self.optimizer = Optimizer(self.arena, self.team, self.parameters, run)
        self._lend_scratch()
        self.model = Model(config, params, run, self.arena, self.team)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.team.close()
        self.checkpoints.close()

    def reserve(self, rows):
        """Have room on the disk, if block inputs wait there, for those of a batch of so many rows (B T).

        Raises UserError where there is none.
        """
        layers = max(self.config.num_hidden_layers - self.run.stored_layers, 0)
        self.checkpoints.reserve(layers * rows * self.config.hidden_size * self.arena.dtype.itemsize)

    @property
    def trainable_parameters(self):
        """How many numbers are trained."""
        return sum(p.value.size for p in self.parameters)

    @collector_paused()
    def step(self, window, rate):
        """One update from a window of batches (gradient accumulation); returns a StepResult.

        The loss is the mean over all trained tokens of the window, whatever batch they are in.
        Where the norm is not finite nothing moves.
        Raises UserError for a batch that does not fit the model, and nothing has changed.  An engine whose
        step raised anything else (ArenaFull, a full disk, an interrupt) is spent: its arena is as it was then.
        """
        self._begin(window)
        self.arena.stage("forward")
        self.team.flops = Counter()
        self.steps += 1
        tokens = sum(batch.trained_tokens for batch in window)
        with self.arena.temp("squares", (1,), np.float64) as squares:
            fill(self.team, squares, 0)
            step = self._exact_step if self.method.exact else self._mezo_step
            loss = step(window, rate, tokens, squares)
            norm = float(np.sqrt(squares[0]))
        self.arena.expect_balance()
        return StepResult(loss, norm, tokens)

    def loss(self, batch):
        """Mean loss per trained token, by a forward pass that keeps nothing."""
        total, _ = self.evaluate(batch)
        return total / batch.trained_tokens

    def evaluate(self, batch):
        """(sum of the losses, how many targets were the likeliest token), by a forward pass without dropout."""
        self._begin([batch])
        with self._placed("an evaluation", batch), self.model.inputs(batch) as inputs:
            backprop.forward_losses(self, inputs)
            return self.model.sum_losses(inputs), int(inputs.hits.sum())

    def window_loss(self, window, *around):
        """Sum of the losses of a step's batches, forward only; `around` as in backprop.forward_losses."""
        part, total = "a forward pass on copies" if around else "a forward pass", 0.0
        for index, batch in enumerate(window):
            with self._placed(part, batch), self.model.inputs(batch, self._draw(index)) as inputs:
                backprop.forward_losses(self, inputs, *around)
                total += self.model.sum_losses(inputs)
        return total

    def gradients(self, batch):
        """Parameter name -> copy of the gradient of the batch's mean loss (MeZO: its estimate)."""
        self._begin([batch])
        copies, tokens = {}, batch.trained_tokens

        def collect(parameters):
            copies.update({p.name: p.grad.copy() for p in parameters})
            self._drop_gradients(parameters)

        if self.method.exact:
            self._one_batch(batch, tokens, collect)
        else:
            derivatives, _ = mezo.projections(self, [batch], tokens)
            mezo.estimate(self, derivatives, lambda p, grad: copies.update({p.name: grad.copy()}))
        return {p.name: copies[p.name] for p in self.parameters}

    def make_gradients(self, parameters):
        """Zeroed gradients for those that have none yet in this window."""
        for p in parameters:
            if p.grad is None:
                p.grad = self.arena.alloc(p.name + ".grad", p.value.shape, category="grad")
                fill(self.team, p.grad, 0)

    @contextmanager
    def _placed(self, part, batch):
        """Place the tensors of one of PARTS as a whole.  The first to do it, for a shape of batch, is a phantom."""
        key = self.config, self.run, part, batch.ids.shape
        if key not in SCHEDULES and self.arena.capacity is None:
            with self.arena.rehearse(part) as recorder:
                yield
            keep(key, recorder.schedule)
            return
        if key not in SCHEDULES:
            with Engine(self.config, phantom_weights(self.config), self.run) as phantom:
                PARTS[part](phantom, Batch.phantom(batch.ids.shape))
        with self.arena.follow(part, SCHEDULES[key]):
            yield

    def _begin(self, window):
        """Refuse batches that do not fit the model, and open a new page in the ledger."""
        for batch in window:
            batch.check(self.config.vocab_size, self.run.seq)
        self.arena.ledger.restart()

    def _exact_step(self, window, rate, tokens, squares):
        def update(parameters):
            self._update(parameters, rate, squares)

        if len(window) == 1:
            return self._one_batch(window[0], tokens, update) / tokens
        return self._several_batches(window, tokens, update) / tokens

    def _one_batch(self, batch, tokens, use):
        """Sum of the losses; use(parameters) is called when their gradients are complete, to use and drop them."""
        def use_layer(parameters):
            self.arena.stage("update")
            use(parameters)
            self.arena.stage("backward")

        with self._placed("the step", batch):
            total = self._accumulate(batch, 0, 1.0 / tokens, use_layer if self.run.update == "fused" else None)
            self.arena.stage("update")
            use([p for p in self.parameters if p.grad is not None])
        return total

    def _several_batches(self, window, tokens, use):
        """The same, the gradients made before the first batch; each batch is placed by itself, whatever its shape."""
        self.make_gradients(self.parameters)
        total = 0.0
        for index, batch in enumerate(window):
            with self._placed("a batch of several", batch):
                total += self._accumulate(batch, index, 1.0 / tokens)
        self.arena.stage("update")
        use(self.parameters)
        return total

    def _update(self, parameters, rate, squares):
        """Add to the squared norm, move the parameters, and drop their gradients."""
        with self.team.counting("update"):
            for p in parameters:
                add_squares(self.team, squares, p.grad)
            clip = clip_factor(squares, self.run.clip)
            for p in parameters:
                self.optimizer.step(p, p.grad, rate, self.steps, clip)
            self._drop_gradients(parameters)

    def _mezo_step(self, window, rate, tokens, squares):
        """As the exact step, but a tensor's gradient exists only while it is visited."""
        derivatives, loss = mezo.projections(self, window, tokens)
        self.arena.stage("update")
        with self.team.counting("update"):
            mezo.estimate(self, derivatives, lambda p, grad: add_squares(self.team, squares, grad))
            clip = clip_factor(squares, self.run.clip)
            mezo.estimate(self, derivatives, lambda p, grad: self.optimizer.step(p, grad, rate, self.steps, clip))
        return loss

    def _draw(self, index):
        """The key of the dropout masks of a batch in this step's window: the same for every method and probe."""
        return key(self.run.seed, self.steps, index) if self.run.dropout else None

    def _accumulate(self, batch, index, scale, update=None):
        with self.model.inputs(batch, self._draw(index)) as inputs:
            backprop.gradients(self, inputs, scale, update)
            return self.model.sum_losses(inputs)

    def _drop_gradients(self, parameters):
        for p in parameters:
            self.arena.free(p.grad)
            p.grad = None

    def _lend_scratch(self):
        shape = self.run.threads, matmul.scratch_elements(self.run.compute)
        matmul.lend(self.team, self.arena.alloc("team.weight_tile", shape, category="weight_tile"))


PARTS = {                               # of the work, that leave live what they found -> what has one in it
    "the step": lambda engine, batch: engine.step([batch], rate=1.0),
    "a batch of several": lambda engine, batch: engine.step([batch] * 2, rate=1.0),
    "a forward pass": lambda engine, batch: engine.window_loss([batch]),
    "a forward pass on copies": lambda engine, batch: engine.step([batch], rate=1.0),
    "an evaluation": lambda engine, batch: engine.evaluate(batch),
}


@dataclass(frozen=True)
class Plan:
    """What a step costs, exactly.  `ledger` and `setup_events` hold every event."""

    run: object
    shape: tuple
    trainable_parameters: int
    extent_bytes: int
    ledger: object
    setup_events: list
    flops: dict

    @property
    def live_peak_bytes(self):
        return self.ledger.live_peak


def plan_step(config, run, shape=None, weights=None):
    """Plan of one step of batches of `shape` (B, T), by default the run's own.

    weights  as for Engine, for their stored dtypes; by default bf16
    """
    shape = shape or (run.batch_size, run.seq)
    with Engine(config, weights or phantom_weights(config), run) as engine:
        engine.step([Batch.phantom(shape)] * run.grad_accumulation, rate=1.0)
        return Plan(run, shape, engine.trainable_parameters, engine.arena.extent, engine.arena.ledger,
                    engine.setup_events, dict(engine.team.flops))


def plan_setup(config, run, weights):
    """Extent in bytes of what an engine holds before any step."""
    with Engine(config, weights, run) as engine:
        return engine.arena.extent


def plan_loss(config, run, shape, weights=None):
    """Extent in bytes of a forward pass that keeps nothing, on a batch of `shape` (B, T)."""
    with Engine(config, weights or phantom_weights(config), run) as engine:
        engine.evaluate(Batch.phantom(shape))
        return engine.arena.extent
