"""What is not a number ends a training run, and never takes the place of what was saved before."""

import math

import numpy as np
import pytest

from mesp_np.checkpoint import folder, safetensors_file
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.engine import Engine
from tests import small, tiny_tokenizer
from tests.training import log, train


def test_loss_that_is_not_a_number_stops_the_run(model, data, tmp_path, capsys):
    """What was logged before stays; nothing that is broken is saved."""
    assert train(model, data, tmp_path / "run", "--iters", "40", "--lr", "1e30", "--warmup", "0") == 1
    assert "step 2: loss is" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "log.jsonl"}
    assert [line["step"] for line in log(tmp_path / "run")] == [1]


@pytest.mark.parametrize("method", ["mesp-lean", "mezo"])
@pytest.mark.parametrize("flags", [["--iters", "1"], ["--iters", "5", "--save-every", "1"]], ids=" ".join)
def test_what_diverged_in_its_last_step_is_not_saved(model, data, tmp_path, capsys, flags, method):
    """Its numbers are still finite, no later step sees the loss, and there may be no validation."""
    assert train(model, data, tmp_path / "run", *flags, "--method", method, "--lr", "1e30", "--warmup", "0") == 1
    assert "step 1: loss is" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "log.jsonl"}


def test_numbers_beyond_float32_never_take_the_place_of_a_saved_adapter(model, data, tmp_path, capsys, monkeypatch):
    """In float64 their loss may be finite still; NaN is refused as well."""
    step, bad = Engine.step, iter((1e300, np.nan))

    def break_one_number(engine, *args, **settings):
        result = step(engine, *args, **settings)
        if engine.steps == 2:
            engine.parameters[3].value[0, 1] = next(bad)
        return result

    monkeypatch.setattr(Engine, "step", break_one_number)
    for run in ("huge", "nan"):
        assert train(model, data, tmp_path / run, "--iters", "2", "--save-every", "1", "--dtype", "float64") == 1
        assert "step 2: not all of layers.0.self_attn.k_proj.lora_B is finite after it" in capsys.readouterr().err
        saved = safetensors_file.read(tmp_path / run / "adapter" / "adapter_model.safetensors")
        assert len(saved) == 28 and all(np.isfinite(array).all() for array in saved.values())


def test_a_validation_loss_that_is_no_number_fails_the_run(model, data, tmp_path, capsys, monkeypatch):
    """The one row held out is a batch of its own."""
    evaluate = Engine.evaluate

    def no_number_at_last(engine, batch):
        return (math.nan, 0) if engine.steps == 2 and len(batch.ids) == 1 else evaluate(engine, batch)

    monkeypatch.setattr(Engine, "evaluate", no_number_at_last)
    assert train(model, data, tmp_path / "run", "--iters", "2", "--json") == 1
    out, error = capsys.readouterr()
    assert out == "" and error.count("\n") == 1 and "the loss is not a number (nan)" in error


def test_a_weight_that_is_not_a_number_stops_the_run_where_it_is_met(tmp_path, capsys):
    """The embedding of a letter that one row has: the adapter saved before that row's step is the one that stays."""
    path, config = tmp_path / "model", small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE,
                                                          tie_word_embeddings=False)
    weights = small.weights(config)
    [letter] = Tokenizer(tiny_tokenizer.write(path), config.vocab_size).encode("Z")
    weights["model.embed_tokens.weight"][letter, 7] = np.nan
    folder.save(path, config, weights, path)
    (tmp_path / "train.jsonl").write_text("".join(f'{{"text": "line {i}"}}\n' for i in range(9)) + '{"text": "Z!"}\n')
    flags = "--schedule", "constant", "--warmup", "0", "--eval-every", "0", "--sample-tokens", "0", "--batch-size", "1"
    assert train(str(path), str(tmp_path), tmp_path / "bad", *flags, "--epochs", "1", "--save-every", "1") == 1
    good = len(log(tmp_path / "bad"))
    assert 0 < good < 9 and f"step {good + 1}: loss is nan" in capsys.readouterr().err
    assert all(math.isfinite(line["loss"]) for line in log(tmp_path / "bad"))
    assert not (tmp_path / "bad" / "summary.json").exists()
    assert train(str(path), str(tmp_path), tmp_path / "good", *flags, "--iters", str(good)) == 0
    saved = [(tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes() for run in ("bad", "good")]
    assert saved[0] == saved[1]


def test_failure_at_the_first_step_leaves_nothing(model, data, tmp_path, capsys):
    assert train(model, data, tmp_path / "run", "--iters", "4", "--method", "mezo", "--mezo-eps", "1e30") == 1
    assert "step 1: loss is" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
