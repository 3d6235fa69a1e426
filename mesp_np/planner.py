"""The planner: a budget instead of a method.

It sets those knobs of a run that decide bytes and time, and nothing else but for last digits:

    knob              choices, fewest bytes first    what fewer bytes cost
    stored_layers     0 to all                       a replay of each layer that is not stored
    checkpoint_store  disk, ram                      writing the block inputs, and reading them again
    checkpoint_every  several, 1                     a forward more for each block input that is left out
    row_tile          32, 64, 128, 256               every weight is made dense once for each tile of rows
    loss              vocab:1024, rows:C             the logits of a trained head twice; C is the row tile
    update            fused where that can be        nothing

So each layer keeps one of two sets: `mesp-lean`'s if it is replayed, `store-lean`'s if it is stored.
The larger sets of `mesp`, `mebp` and `store` save no time: what they keep beyond these is formed again as
fast as it is read.  Spacing is for where there is no disk: a forward costs ten times what a disk does.
A frozen head's logits are the smallest part of a step by vocabulary tiles, and formed once.

Time      Of two candidates the one of less modelled work is held to be faster (`prices.py`): its FLOPs, with
          what it costs to make weights dense and to use the disk added in FLOPs.

Bytes     A candidate fits if its exact plan does.  Guesses, from plans of few layers, say what is worth one.

Search    The fastest candidate that should fit is planned, then those that are faster still.  One that does
          not fit rules out all that hold as much and more, so a handful of plans will do.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import inf, isqrt

from mesp_np.engine import plan_step
from mesp_np.errors import UserError
from mesp_np.ledger import show_bytes
from mesp_np.machine import free_memory, spare_disk
from mesp_np.prices import Prices
from mesp_np.saved import tiles

KNOBS = ("stored_layers", "checkpoint_store", "checkpoint_every", "row_tile", "loss", "update")
EXACT = ("stored_layers", "checkpoint_store", "checkpoint_every", "update")   # these change no bit of what is trained
ROW_TILES = (32, 64, 128, 256)
MOST_TILES = 16                                 # in a batch, if that will do: many small tiles take long to plan
HOPE = 1.5                                      # times the budget: what is guessed to take more is not planned
MIB = 2 ** 20


@dataclass(frozen=True)
class Candidate:
    """A run, its modelled work in FLOPs, a guess of its extent in bytes, and levels, by which `holds` can tell."""

    run: object
    work: float
    guess: float
    levels: tuple

    def holds(self, other):
        """Are its bytes at least those of `other`?"""
        return all(mine >= its for mine, its in zip(self.levels, other.levels))


@dataclass(frozen=True)
class Figures:
    """What an exact plan says.

    extent_bytes     what the arena takes; beside_bytes: what else is needed at the same time
    live_peak_bytes  the most of it that is live at once
    """

    extent_bytes: int
    live_peak_bytes: int
    flops: int
    beside_bytes: int = 0

    @property
    def bytes(self):
        """What a budget must cover."""
        return self.extent_bytes + self.beside_bytes


@dataclass(frozen=True)
class Choice:
    """The run that was chosen, and what else there was.

    free      names of the knobs that could be set
    budget    bytes; `automatic`: half of the free memory, for want of another
    slower    its work, as a multiple of the fastest candidate's
    larger    (budget, run, saved): the next budget that buys a faster run, and the part of the work that it
              saves; None if this is the fastest
    planned   how many exact plans it took
    """

    run: object
    free: tuple
    figures: Figures
    budget: int
    automatic: bool
    slower: float
    larger: tuple | None
    planned: int

    @property
    def fits(self):
        """False when even the smallest is beyond what was to be had by itself, half of the free memory."""
        return self.figures.bytes <= self.budget

    def settings(self, run=None):
        """Knob -> value, of those that could be set, in the run that was chosen or in another."""
        return {name: getattr(run or self.run, name) for name in self.free}

    def changes(self, run):
        """The settings in which another run differs from the one chosen."""
        return {name: value for name, value in self.settings(run).items() if value != getattr(self.run, name)}


def free_knobs(given):
    """The knobs that may be set when the fields in `given` were set by hand; a method or a keep set comes as it is."""
    return () if {"method", "keep"} & set(given) else tuple(name for name in KNOBS if name not in given)


def plan_figures(config, run, shape=None, weights=None):
    """Figures of a step of batches of `shape` (B, T)."""
    plan = plan_step(config, run, shape, weights)
    return Figures(plan.extent_bytes, plan.live_peak_bytes, sum(plan.flops.values()))


def choose(config, run, free, measure, budget=0, shape=None):
    """The fastest run that fits, as a Choice; it differs from `run` in the fields named in `free` at most.

    measure  run -> Figures
    budget   bytes.  0: half of the free memory, and only what changes no bit of what is trained
    shape    (B, T) of the largest batch; by default the run's own

    Raises UserError with the smallest budget that would do, when nothing fits.
    """
    room = budget or free_memory() // 2
    free = tuple(name for name in free if budget or name in EXACT)
    shape, measure = shape or (run.batch_size, run.seq), cache(measure)
    for most_tiles in (MOST_TILES, inf):
        search = Search(candidates(config, run, free, shape, most_tiles), measure)
        if best := search.fastest(room):
            break
    best = best or search.smallest()
    figures, fastest = search.figures(best), search.candidates[0]
    if budget and figures.bytes > budget:
        how = ", ".join(f"{name} {getattr(best.run, name)}" for name in free) or f"method {run.method}"
        raise UserError(f"--memory-budget is {show_bytes(budget)}: nothing fits into it, the smallest is "
                        f"{show_bytes(figures.bytes)}, with {how}",
                        "raise it, or make --batch-size, --seq, " + "--sample-tokens, " * bool(figures.beside_bytes) +
                        "or --rank smaller")
    larger = search.larger(best, room)
    return Choice(best.run, free, figures, room, not budget, best.work / fastest.work, larger,
                  measure.cache_info().misses)


class Search:
    """Candidates in order of work, and the figures of those that were planned."""

    def __init__(self, candidates, measure):
        self.candidates = sorted(candidates, key=lambda candidate: (candidate.work, candidate.guess))
        self.planned, self._measure, self._error = {}, measure, 0

    def figures(self, candidate):
        """Figures of an exact plan, made once; they also tell by how much the guesses are wrong hereabouts."""
        if candidate not in self.planned:
            self.planned[candidate] = self._measure(candidate.run)
            self._error = self.planned[candidate].bytes - candidate.guess
        return self.planned[candidate]

    def fastest(self, budget, below=inf):
        """The candidate of least work, less than `below`, that fits into so many bytes; None if none does."""
        best, left = None, [candidate for candidate in self.candidates if candidate.work < below]
        self.figures(left[0])
        while probe := self._next(left, budget):
            if self.figures(probe).bytes <= budget:
                best, left = probe, left[:left.index(probe)]
            else:
                left = [candidate for candidate in left if not candidate.holds(probe)]
        return best

    def _next(self, left, budget):
        """What to plan next: the fastest that should fit, else the one that is nearest to it; None if that is far."""
        expected = {candidate: candidate.guess + self._error for candidate in left}
        hopeful = next((candidate for candidate in left if expected[candidate] <= budget), None)
        near = (candidate for candidate in left if expected[candidate] <= HOPE * budget)
        return hopeful or min(near, key=expected.get, default=None)

    def smallest(self):
        """The candidate of fewest bytes."""
        least = [one for one in self.candidates
                 if not any(one.holds(other) and one is not other for other in self.candidates)]
        return min(least, key=lambda candidate: self.figures(candidate).bytes)

    def larger(self, chosen, budget):
        """The next round budget that buys a faster run, as in Choice; None if `chosen` is the fastest."""
        while chosen.work > self.candidates[0].work:
            budget = next_round(budget)
            if better := self.fastest(budget, below=chosen.work):
                return budget, better.run, 1 - better.work / chosen.work
        return None


def next_round(size):
    """The next of ... 64, 96, 128, 192, 256, 384 ... MiB above a number of bytes."""
    power = MIB
    while 2 * power <= size:
        power *= 2
    return next(mark for mark in (power, 3 * power // 2, 2 * power) if mark > size)


def candidates(config, run, free, shape, most_tiles=MOST_TILES):
    """Every run that differs from `run` in the fields named in `free` only, and is worth a thought.

    shape       (B, T) of the batches
    most_tiles  that one is to be cut into
    """
    found = []
    if "update" in free and not run.clip and run.grad_accumulation == 1:
        run = replace(run, update="fused")
    for tile in _row_tiles(shape, most_tiles) if "row_tile" in free else (run.row_tile,):
        variants = (run.loss, f"rows:{tile}") if "loss" in free and run.trainable == "full" else (run.loss,)
        for level, loss in enumerate(variants):
            one = replace(run, row_tile=tile, loss=loss)
            prices = Prices(config, one, shape)
            for made, place in _placements(one, prices, free):
                levels = tile, level, made.stored_layers, *place
                found.append(Candidate(made, prices.work(made), prices.extent(made), levels))
    return found


def _row_tiles(shape, most_tiles):
    """Rows of tiles: of those that cut a batch into as many, the largest."""
    rows = {len(tiles(*shape, most)): most for most in ROW_TILES}
    return [most for count, most in rows.items() if count <= max(most_tiles, min(rows))]


def _placements(run, prices, free):
    """(run, levels) for each number of stored layers, and each place for the inputs of the others."""
    layers = prices.layers
    on_disk = "checkpoint_store" in free and spare_disk() > layers * prices.input_bytes
    spaced = "checkpoint_every" in free and not on_disk and run.checkpoint_store != "disk"
    spacings = range(1, isqrt(layers) + 2) if spaced else (run.checkpoint_every,)
    top = (len(spacings) + 1,) * 2
    places = {(run.checkpoint_store, every): (every, top[0] - every) for every in spacings}      # none above another,
    places[run.checkpoint_store, spacings[0]] = top                                              # the first above all,
    if on_disk:
        places["disk", spacings[0]] = 0, 0                                                       # the disk below all
    for stored in range(layers + 1) if "stored_layers" in free else (run.stored_layers,):
        for number, ((store, every), levels) in enumerate(places.items()):
            if number == 0 or every <= layers - stored:
                yield replace(run, stored_layers=stored, checkpoint_store=store, checkpoint_every=every), levels
