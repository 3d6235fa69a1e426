"""A plan in a file: it comes back as it was, and is refused where it does not belong."""

import json
from dataclasses import replace

import pytest

from mesp_np import plan_file
from mesp_np.config import RunConfig
from mesp_np.errors import UserError
from mesp_np.planner import plan_figures
from tests import small

RUN = small.run_config(keep=("x", "mid"), layers=(0, -1), stored_layers=1, alpha=3, seed=5)


@pytest.fixture
def config():
    return small.model_config()


@pytest.fixture
def path(tmp_path, config):
    plan_file.save(tmp_path / "plan.json", config, RUN, 10 ** 6, plan_figures(config, RUN))
    return tmp_path / "plan.json"


def test_a_plan_comes_back(path, config):
    saved = plan_file.load(path)
    assert replace(RunConfig(**saved.run), seed=5) == RUN
    assert saved.memory_budget == 10 ** 6
    saved.check(config, RUN)


def test_another_seed_needs_no_other_plan(path, config):
    saved = plan_file.load(path)
    assert "seed" not in saved.run
    saved.check(config, replace(RUN, seed=77))


@pytest.mark.parametrize("change, words", [
    (lambda plan: plan.pop("extent_bytes"), "extent_bytes is missing"),
    (lambda plan: plan.update(colour="red"), "colour is no key of a plan"),
    (lambda plan: plan["run"].update(colour="red"), "run.colour is no key of a plan"),
    (lambda plan: plan["run"].pop("rank"), "run.rank is missing"),
    (lambda plan: plan["run"].update(rank="8"), "run.rank is '8'"),
    (lambda plan: plan["run"].update(rank=8.0), "run.rank is 8.0"),
    (lambda plan: plan["run"].update(rank=True), "run.rank is True"),
    (lambda plan: plan["run"].update(layers=["a"]), "run.layers is ['a']"),
    (lambda plan: plan["run"].update(targets="q_proj"), "run.targets is 'q_proj'"),
    (lambda plan: plan["run"].update(rslora=0), "run.rslora is 0"),
    (lambda plan: plan["run"].update(rank=0), "rank is 0; "),
    (lambda plan: plan["run"].update(row_tile=-4), "row-tile is -4; "),
    (lambda plan: plan["run"].update(loss="some"), "loss is 'some'"),
    (lambda plan: plan["run"].update(alpha=float("nan")), "alpha is nan"),
    (lambda plan: plan["model"].pop("head_dim"), "model.head_dim is missing"),
    (lambda plan: plan["model"].update(qkv_bias=1), "model.qkv_bias is 1"),
    (lambda plan: plan.update(model=[]), "model is []"),
    (lambda plan: plan.update(memory_budget=1.5), "memory_budget is 1.5"),
])
def test_what_is_wrong_in_a_plan_is_named(path, change, words):
    plan = json.loads(path.read_text())
    change(plan)
    path.write_text(json.dumps(plan))
    with pytest.raises(UserError) as refused:
        plan_file.load(path)
    assert f"{path}: " in str(refused.value) and words in str(refused.value)
    assert "mesp-np plan --save" in str(refused.value)


def test_all_that_is_wrong_is_told_at_once(path):
    plan = json.loads(path.read_text())
    plan["run"] |= {"rank": "8", "seq": None, "more": 1}
    path.write_text(json.dumps(plan))
    with pytest.raises(UserError, match="3 problems") as refused:
        plan_file.load(path)
    assert all(words in str(refused.value) for words in ("run.more is no key", "run.seq is None", "run.rank is '8'"))


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_what_is_no_plan_at_all(path, text):
    path.write_text(text)
    with pytest.raises(UserError, match="plan.json: "):
        plan_file.load(path)


def test_a_plan_of_a_model_of_other_sizes(path, config):
    other = replace(config, hidden_size=64, num_hidden_layers=3)
    with pytest.raises(UserError) as refused:
        plan_file.load(path).check(other, RUN)
    assert "is for a model with hidden_size 48, this one has 64" in str(refused.value)
    assert "num_hidden_layers 2, this one has 3" in str(refused.value)


def test_a_plan_whose_bytes_are_others_now(path, config):
    saved = plan_file.load(path)
    for name in ("extent_bytes", "live_peak_bytes"):
        with pytest.raises(UserError, match="says .* a step of this model takes"):
            replace(saved, **{name: getattr(saved, name) + 1}).check(config, RUN)
