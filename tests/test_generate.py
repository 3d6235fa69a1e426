"""Generation: the cache changes nothing, and sampling draws what it says."""

import numpy as np
import pytest

from mesp_np.engine import Engine, plan_loss, plan_setup
from mesp_np.errors import UserError
from mesp_np.generate import choose, generate, generator
from mesp_np.ops import linear
from tests import small


@pytest.fixture
def engine():
    config = small.model_config()
    run = small.run_config(method="mezo", dtype="float64", seq=90)
    weights = small.weights(config, "float64")
    with Engine(config, weights, run, plan_setup(config, run, weights)) as engine:
        rng = np.random.default_rng(0)
        for p in engine.parameters:
            p.value[:] = 0.2 * rng.standard_normal(p.value.shape)
        yield engine


def test_token_by_token_equals_all_at_once(engine):
    ids = np.random.default_rng(1).integers(0, engine.config.vocab_size, 80).tolist()
    for count in (1, 2, 65, 80):
        whole = generator(engine, 90).logits(ids[:count])
        stepwise = generator(engine, 90)
        for token in ids[:count]:
            last = stepwise.logits([token])
        np.testing.assert_allclose(last, whole, rtol=1e-9, atol=1e-9)


def test_cached_logits_are_the_training_models(engine, monkeypatch):
    """The loss's own logits, caught on their way, against the generator's."""
    ids = list(range(20, 33))
    seen, plain = [], linear.forward
    batch = small.Batch.of([ids], [[-100] * 12 + [5]])
    run = small.run_config(method="mezo", dtype="float64", seq=90, loss="rows:1")
    weights = small.weights(engine.config, "float64")
    with Engine(engine.config, weights, run, plan_loss(engine.config, run, (1, 13), weights)) as trainer:
        for p, q in zip(trainer.parameters, engine.parameters, strict=True):
            p.value[:] = q.value
        head = trainer.model.params.head.value

        def watched(team, out, x, weight, bias=None):
            plain(team, out, x, weight, bias)
            if weight is head:
                seen.append(out[0].copy())

        monkeypatch.setattr(linear, "forward", watched)
        trainer.loss(batch)
    np.testing.assert_allclose(generator(engine, 90).logits(ids), seen[-1], rtol=1e-9, atol=1e-9)


def test_stops_at_end_of_text_and_at_the_last_position(engine):
    greedy = list(generate(generator(engine, 90), [1, 2, 3], 20))
    assert len(greedy) == 20
    assert list(generate(generator(engine, 90), [1, 2, 3], 20, eos_ids={greedy[4]})) == greedy[:greedy.index(greedy[4])]
    assert len(list(generate(generator(engine, 8), [1, 2, 3], 20))) == 5


def test_no_room_and_no_prompt_are_refused(engine):
    with pytest.raises(UserError, match="3 tokens"):
        next(generate(generator(engine, 3), [1, 2, 3], 5))
    with pytest.raises(UserError, match="no token"):
        next(generate(generator(engine, 3), [], 5))


def test_same_seed_same_text(engine):
    texts = [list(generate(generator(engine, 90), [1], 10, temperature=1.0, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_top_p_draws_from_the_smallest_set():
    logits, rng = np.log(np.array([0.5, 0.1, 0.3, 0.1])), np.random.default_rng(0)
    assert {choose(logits, 1.0, 0.5, rng) for _ in range(200)} == {0}
    assert {choose(logits, 1.0, 0.6, rng) for _ in range(200)} == {0, 2}
    drawn = [choose(logits, 1.0, 1.0, rng) for _ in range(4000)]
    assert np.allclose(np.bincount(drawn) / 4000, [0.5, 0.1, 0.3, 0.1], atol=0.03)
    assert choose(logits, 0.0, 1.0, rng) == 0
