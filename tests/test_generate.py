"""Generation: the cache changes nothing, and sampling draws what it says."""

import numpy as np
import pytest

from mesp_np import generate as generate_module
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.engine import Engine, plan_loss, plan_setup
from mesp_np.errors import UsageError, UserError
from mesp_np.generate import Sampling, generate, generator, likeliest, pieces, sampler
from mesp_np.ops import linear
from tests import small, tiny_tokenizer


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

        def watched(team, out, x, weight, *rest):
            plain(team, out, x, weight, *rest)
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
    def text(seed):
        return list(generate(generator(engine, 90), [1], 10, choose=sampler(Sampling(temperature=1.0), seed)))
    assert text(1) == text(1) != text(2)


def drawn(count, **settings):
    draw, logits = sampler(Sampling(temperature=1.0, **settings)), np.log(np.array([0.5, 0.1, 0.3, 0.1]))
    return [draw(logits) for _ in range(count)]


def test_top_p_draws_from_the_smallest_set():
    assert set(drawn(200, top_p=0.5)) == {0}
    assert set(drawn(200, top_p=0.6)) == {0, 2}
    assert np.allclose(np.bincount(drawn(4000)) / 4000, [0.5, 0.1, 0.3, 0.1], atol=0.03)
    assert sampler(Sampling()) is likeliest and likeliest(np.array([0.1, 0.5, 0.2])) == 1


def test_top_k_draws_from_the_likeliest_and_top_p_is_of_these():
    assert set(drawn(200, top_k=1)) == {0}
    assert np.allclose(np.bincount(drawn(4000, top_k=2), minlength=4) / 4000, [5 / 8, 0, 3 / 8, 0], atol=0.03)
    assert set(drawn(200, top_k=2, top_p=0.625)) == {0}


def test_odd_sampling_is_refused():
    for settings in ({"temperature": -1}, {"temperature": np.inf}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": -1}):
        with pytest.raises(UsageError):
            Sampling(**settings)


def test_a_long_prompt_in_chunks_gives_the_same_logits(engine, monkeypatch):
    ids = np.random.default_rng(1).integers(0, engine.config.vocab_size, 80).tolist()
    whole = generator(engine, 90)
    expected = whole.logits(ids)
    monkeypatch.setattr(generate_module, "CHUNK", 7)
    chunked = generator(engine, 90)
    np.testing.assert_allclose(chunked.logits(ids), expected, rtol=1e-9, atol=1e-9)
    assert chunked.arena.capacity < whole.arena.capacity


def test_the_cache_goes_back_to_the_common_beginning(engine):
    """A sequence that changes after its third token: only what follows is computed, and the logits are its own."""
    source = generator(engine, 90)
    source.logits([1, 2, 3, 4, 5])
    rest = source.resume([1, 2, 3, 9, 8, 7])
    assert rest == [9, 8, 7] and source.tokens == [1, 2, 3]
    np.testing.assert_allclose(source.logits(rest), generator(engine, 90).logits([1, 2, 3, 9, 8, 7]), 1e-9, 1e-9)
    assert source.resume([1, 2, 3, 9]) == [9]             # the last token needs its pass, though it is known


def test_a_character_of_several_tokens_waits(tmp_path):
    tokenizer = Tokenizer(tiny_tokenizer.write(tmp_path), tiny_tokenizer.VOCAB_SIZE)
    text = "né 猫\ufffd!"
    assert list(pieces(tokenizer.encode(text), tokenizer)) == ["n", "é", " ", "猫", "\ufffd!", ""]
    assert list(pieces(tokenizer.encode("猫")[:2], tokenizer)) == ["\ufffd"]     # never whole: shown at the end


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_is_not_a_number_is_refused(temperature):
    with small.engine() as engine, pytest.raises(UserError, match="is not a number"):
        engine.parameters[0].value[:] = np.nan
        list(generate(generator(engine, 9), [1, 2], 3, choose=sampler(Sampling(temperature))))
