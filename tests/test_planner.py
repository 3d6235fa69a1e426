"""The planner: what it chooses fits, is the fastest that does, and computes the same bits."""

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from mesp_np import planner
from mesp_np.arena import ArenaFull
from mesp_np.config import PRESETS
from mesp_np.engine import Engine, plan_step
from mesp_np.errors import UserError
from mesp_np.prices import Prices
from tests import small

PLENTY = 10 ** 15
SHAPE = 1, 70
CASES = {                       # layers, free disk, settings
    "adapters": (5, PLENTY, {}),
    "no disk": (6, 0, {}),
    "every weight": (4, PLENTY, {"trainable": "full"}),
    "clipped": (4, 0, {"optimizer": "adamw", "clip": 1.0}),
    "some layers": (5, PLENTY, {"layers": (1, 3)}),
    "several batches": (4, PLENTY, {"grad_accumulation": 3}),
    "a keep set": (4, PLENTY, {"keep": ("q", "k", "v", "ctx")}),
}


figures = cache(planner.plan_figures)


class Case:
    """A model and a run, and the exact figures of all that the planner may choose from."""

    def __init__(self, monkeypatch, layers=5, disk=PLENTY, settings=(), free=planner.KNOBS):
        monkeypatch.setattr(planner, "spare_disk", lambda: disk)
        self.config, self.free = small.model_config(num_hidden_layers=layers), free
        self.run = small.run_config(**{"batch_size": SHAPE[0], "seq": SHAPE[1], "loss": "vocab:32"} | dict(settings))
        self.figures = partial(figures, self.config)
        self.candidates = planner.candidates(self.config, self.run, free, SHAPE)

    def choose(self, budget=0):
        return planner.choose(self.config, self.run, self.free, self.figures, budget)

    def bytes(self, candidate):
        return self.figures(candidate.run).bytes

    def budgets(self):
        """Sizes of candidates, the least among them, and a byte less than others."""
        sizes = set(map(self.bytes, self.candidates))
        return sorted(sizes | {size - 1 for size in sizes})[1::3]

    def least_work(self, budget):
        """What trying all candidates finds; None when none fits."""
        return min((one.work for one in self.candidates if self.bytes(one) <= budget), default=None)

    def chosen_work(self, budget):
        """The work of what the planner chooses; None when it refuses."""
        try:
            chosen = self.choose(budget).run
        except UserError:
            return None
        return next(one.work for one in self.candidates if one.run == chosen)


@pytest.fixture
def case(monkeypatch):
    return Case(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_the_search_finds_what_trying_everything_finds(monkeypatch, name):
    case = Case(monkeypatch, *CASES[name])
    assert len(case.candidates) > 25
    assert [case.chosen_work(budget) for budget in case.budgets()] == list(map(case.least_work, case.budgets()))


def test_the_search_plans_a_part_of_what_there_is(monkeypatch):
    case = Case(monkeypatch, *CASES["no disk"])
    assert max(case.choose(budget).planned for budget in map(case.bytes, case.candidates)) < len(case.candidates) / 4


@pytest.mark.parametrize("guess", [lambda *_: 0, lambda self, run: 10 ** 6 * run.stored_layers], ids=["none", "wild"])
def test_wrong_guesses_cost_plans_and_no_time(monkeypatch, guess):
    monkeypatch.setattr(Prices, "extent", guess)
    monkeypatch.setattr(planner, "HOPE", float("inf"))
    case = Case(monkeypatch)
    assert [case.chosen_work(budget) for budget in case.budgets()] == list(map(case.least_work, case.budgets()))


def test_a_wrong_order_of_bytes_would_be_seen(monkeypatch):
    """As when block inputs on the disk were held to take more than those in memory."""
    right = planner._placements
    monkeypatch.setattr(planner, "_placements", lambda *args: ((run, (-one, -two)) for run, (one, two) in right(*args)))
    monkeypatch.setattr(Prices, "extent", lambda *_: 0)
    case = Case(monkeypatch)
    assert any(case.chosen_work(budget) != case.least_work(budget) for budget in case.budgets())


def test_a_larger_budget_is_never_slower(case):
    work = [case.chosen_work(budget) for budget in case.budgets()]
    work = [one for one in work if one is not None]
    assert work == sorted(work, reverse=True) and len(set(work)) > 5


@pytest.mark.parametrize("name", ["adapters", "no disk", "every weight", "clipped", "several batches"])
def test_modelled_flops_are_those_of_the_exact_plans(monkeypatch, name):
    case = Case(monkeypatch, *CASES[name])
    prices = cache(lambda *fields: Prices(case.config, replace(case.run, row_tile=fields[0], loss=fields[1]), SHAPE))
    for one in case.candidates:
        assert prices(one.run.row_tile, one.run.loss).flops(one.run) == case.figures(one.run).flops


def test_guesses_are_near(monkeypatch):
    case = Case(monkeypatch, *CASES["no disk"])
    assert all(abs(one.guess / case.bytes(one) - 1) < 0.1 for one in case.candidates)


def test_what_is_chosen_runs_in_its_budget_and_in_no_byte_less(case):
    weights, batch = small.weights(case.config, "bf16"), small.batch(case.config, *SHAPE)
    for budget in case.budgets()[::4]:
        chosen = planner.choose(case.config, case.run, case.free, case.figures, budget)
        with Engine(case.config, weights, chosen.run, budget) as engine:
            engine.step([batch], 1e-3)
            assert engine.arena.extent == chosen.figures.extent_bytes <= budget
            assert engine.arena.ledger.live_peak == chosen.figures.live_peak_bytes
        too_small = chosen.figures.extent_bytes - 1
        with pytest.raises(ArenaFull), Engine(case.config, weights, chosen.run, too_small) as engine:
            engine.step([batch], 1e-3)


@pytest.mark.parametrize("disk", [PLENTY, 0])
def test_every_choice_without_a_budget_has_the_same_bits(monkeypatch, disk):
    """And a choice of row tiles or of the loss has not: those are settings of the run."""
    case = Case(monkeypatch, disk=disk, free=planner.EXACT)
    assert len(case.candidates) > 10
    batch = small.batch(case.config, *SHAPE)
    expected = trained(case, case.run, batch)
    for one in case.candidates:
        assert trained(case, one.run, batch) == expected
    assert trained(case, replace(case.run, row_tile=32), batch) != expected


def trained(case, run, batch):
    """The bits of all adapters after two steps."""
    with small.engine(case.config, **{name: getattr(run, name) for name in run.__dataclass_fields__}) as engine:
        for _ in range(2):
            engine.step([batch], 1e-2)
        return [parameter.value.tobytes() for parameter in engine.parameters]


def test_the_smallest_figure_of_a_refusal_is_a_budget_that_works(case):
    smallest = min(map(case.bytes, case.candidates))
    assert case.choose(smallest).figures.bytes == smallest
    with pytest.raises(UserError) as refused:
        case.choose(smallest - 1)
    assert f"{smallest - 1:,} B" in str(refused.value) and f"the smallest is {smallest:,} B" in str(refused.value)
    assert "stored_layers 0, checkpoint_store disk" in str(refused.value)


def test_tiles_that_take_long_to_plan_are_tried_before_anything_is_refused(monkeypatch):
    case = Case(monkeypatch)
    least = case.choose(min(map(case.bytes, case.candidates))).figures.bytes
    monkeypatch.setattr(planner, "MOST_TILES", 1)
    assert {one.run.row_tile for one in planner.candidates(case.config, case.run, case.free, SHAPE, 1)} == {256}
    assert case.choose(least).figures.bytes == least and case.choose(least).run.row_tile == 32
    with pytest.raises(UserError, match=f"the smallest is {least:,} B"):
        case.choose(least - 1)


@pytest.mark.parametrize("knob, value", [("stored_layers", 2), ("checkpoint_store", "ram"), ("checkpoint_every", 3),
                                         ("row_tile", 40), ("loss", "rows:5"), ("update", "after"),
                                         ("checkpoint_store", "bf16"), ("stored_layers", 9)])
def test_what_is_given_stays(monkeypatch, knob, value):
    free = planner.free_knobs({knob: value, "rank": 4})
    case = Case(monkeypatch, settings={knob: value}, free=free)
    assert set(free) == set(planner.KNOBS) - {knob}
    assert len(case.candidates) > 2 and {getattr(one.run, knob) for one in case.candidates} == {value}
    assert [case.chosen_work(budget) for budget in case.budgets()] == list(map(case.least_work, case.budgets()))


def test_a_keep_set_is_not_replaced_by_stored_layers():
    assert planner.free_knobs({"keep": ("x", "mid"), "rank": 4}) == ()


@pytest.mark.parametrize("method", ["store", "mebp", "mesp-lean", "mezo"])
def test_a_method_stays_as_it_is(monkeypatch, method):
    case = Case(monkeypatch, settings={"method": method}, free=planner.free_knobs({"method": method}))
    need = case.figures(case.run).bytes
    assert case.choose(need).run == case.run and case.choose(need).larger is None
    with pytest.raises(UserError, match=f"the smallest is {need:,} B .* with method {method}"):
        case.choose(need - 1)


def test_rounded_checkpoints_are_never_chosen(case):
    assert {one.run.checkpoint_store for one in case.candidates} == {"ram", "disk"}


def test_block_inputs_are_spaced_where_there_is_no_disk(monkeypatch):
    spaced, on_disk = (Case(monkeypatch, 6, disk).candidates for disk in (0, PLENTY))
    assert {one.run.checkpoint_every for one in spaced} == {1, 2, 3}
    assert {one.run.checkpoint_store for one in spaced} == {"ram"}
    assert {one.run.checkpoint_every for one in on_disk} == {1}


@pytest.mark.parametrize("settings, update", [({}, "fused"), ({"clip": 1.0}, "after"),
                                              ({"grad_accumulation": 2}, "after")])
def test_the_update_is_fused_where_it_can_be(monkeypatch, settings, update):
    assert {one.run.update for one in Case(monkeypatch, settings=settings).candidates} == {update}


def test_without_a_budget_it_is_half_of_the_free_memory(case, monkeypatch):
    for half in (10 ** 12, sorted(map(case.bytes, case.candidates))[-4], 1):
        monkeypatch.setattr(planner, "free_memory", lambda half=half: 2 * half)
        chosen = case.choose()
        assert chosen.automatic and chosen.budget == half and set(chosen.free) == set(planner.EXACT)
        assert (chosen.run.row_tile, chosen.run.loss) == (case.run.row_tile, case.run.loss)
        assert chosen.run.stored_layers == 5 or half < 10 ** 12
        assert chosen.figures.bytes <= half or chosen.run.stored_layers == 0     # the least that there is


def test_what_a_larger_budget_would_buy_is_true(case):
    for budget in case.budgets()[::3]:
        chosen = case.choose(budget)
        if chosen.larger is None:
            assert chosen.slower == 1
            continue
        larger, run, saved = chosen.larger
        better = case.choose(larger)
        assert larger == planner.next_round(budget) > budget and better.run == run
        assert np.isclose(better.slower, chosen.slower * (1 - saved)) and saved > 0
        assert chosen.changes(run) and all(getattr(run, name) == value for name, value in chosen.changes(run).items())


@pytest.mark.parametrize("size, mark", [(1, 2 ** 20), (64 * 2 ** 20, 96 * 2 ** 20), (96 * 2 ** 20, 128 * 2 ** 20),
                                        (100 * 2 ** 20, 128 * 2 ** 20), (2 ** 30 - 1, 2 ** 30)])
def test_round_budgets(size, mark):
    assert planner.next_round(size) == mark


def test_a_handful_of_plans_is_enough_for_half_a_billion_weights():
    config, made = PRESETS["qwen2.5-0.5b"], []
    run = small.RunConfig(batch_size=1, seq=32)

    def measure(one):
        made.append(one)
        return planner.plan_figures(config, one)

    chosen = planner.choose(config, run, planner.KNOBS, measure, 80 * 2 ** 20)
    assert len(made) == len(set(made)) == chosen.planned < 12
    assert chosen.figures.extent_bytes == plan_step(config, chosen.run).extent_bytes <= 80 * 2 ** 20
