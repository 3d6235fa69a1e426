"""eval: the mean over tokens, however they are batched, of the base and of an adapter."""

import json
import math

import numpy as np
import pytest

from mesp_np.checkpoint import adapter, folder
from mesp_np.cli import main
from mesp_np.data.batches import InOrder
from mesp_np.engine import Engine, plan_setup
from mesp_np.evaluate import Evaluation, evaluate, memory_needed
from mesp_np.generate import generator, likeliest
from mesp_np.json_file import dumps
from tests import small, tiny_tokenizer

KEYS = {"loss", "perplexity", "token_accuracy", "trained_tokens"}


def as_json(capsys, *argv):
    assert main(["eval", *argv, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Texts of 2, 9, 4 and 30 characters, one token each, with the end of text after them."""
    path = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": ("abcdefghij" * 3)[:n]}) + "\n" for n in (2, 9, 4, 30)))
    return str(path)


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory, model):
    path = tmp_path_factory.mktemp("adapters") / "adapter"
    with small.engine(folder.load(model).config, rank=4, dropout=0.5) as engine:
        adapter.save(path, engine.parameters, engine.run, model)
    return str(path)


def test_the_mean_is_over_tokens_in_any_batches(model, lines, capsys):
    results = [as_json(capsys, "--model", model, "--data", lines, *more) for more in
               ((), ("--batch-size", "1"), ("--batch-size", "3"), ("--packing",), ("--loss", "rows:5"))]
    for result in results:
        assert set(result) == KEYS and result["trained_tokens"] == 45
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-5)
        assert result["token_accuracy"] == results[0]["token_accuracy"]
        assert result["perplexity"] == math.exp(result["loss"])


def test_the_figures_are_those_of_the_likelihoods(model, lines, capsys):
    """Against the generator's logits, one token after another."""
    checkpoint, result = folder.load(model), as_json(capsys, "--model", model, "--data", lines)
    config, run = checkpoint.config, small.run_config(trainable="none", batch_size=1, seq=31)
    losses, hits = 0.0, 0
    with Engine(config, checkpoint.weights, run, plan_setup(config, run, checkpoint.weights)) as engine:
        for n in (2, 9, 4, 30):
            source, ids = generator(engine, 31), checkpoint.tokenizer.encode(("abcdefghij" * 3)[:n])
            for token, following in zip(ids, [*ids[1:], checkpoint.tokenizer.eos_id]):
                logits = source.logits([token])
                losses += np.log(np.exp(logits).sum()) - logits[following]
                hits += likeliest(logits) == following
    assert result["loss"] == pytest.approx(losses / 45, rel=1e-5) and result["token_accuracy"] == hits / 45


def test_base_and_adapter_side_by_side(model, lines, adapter_folder, capsys):
    """The adapter was trained with dropout; evaluation has none."""
    base = as_json(capsys, "--model", model, "--data", lines)
    both = as_json(capsys, "--model", model, "--data", lines, "--adapter", adapter_folder)
    assert both.pop("base") == base and set(both) == KEYS and abs(both["loss"] - base["loss"]) > 1e-3
    assert as_json(capsys, "--model", model, "--data", lines, "--adapter", adapter_folder)["loss"] == both["loss"]
    main(["eval", "--model", model, "--data", lines, "--adapter", adapter_folder])
    out = capsys.readouterr().out
    assert "base" in out and "adapter" in out and f"{base['loss']:.4f}" in out and f"{both['loss']:.4f}" in out


def test_a_folder_means_its_test_file_or_else_its_valid_file(model, tmp_path, capsys):
    for name, text in (("train", "abc"), ("valid", "abcd")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert as_json(capsys, "--model", model, "--data", str(tmp_path))["trained_tokens"] == 4
    (tmp_path / "test.jsonl").write_text('{"text": "abcde"}\n')
    assert as_json(capsys, "--model", model, "--data", str(tmp_path))["trained_tokens"] == 5
    main(["eval", "--model", model, "--data", str(tmp_path)])
    assert "test.jsonl" in capsys.readouterr().err
    for path in (tmp_path / "test.jsonl", tmp_path / "valid.jsonl"):
        path.unlink()
    assert main(["eval", "--model", model, "--data", str(tmp_path)]) == 1
    assert "holds neither test.jsonl nor valid.jsonl" in capsys.readouterr().err


def test_flags_decide_what_is_counted(model, lines, tmp_path, capsys):
    assert as_json(capsys, "--model", model, "--data", lines, "--no-eos")["trained_tokens"] == 41
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "ab", "completion": "cde"}\n')
    assert as_json(capsys, "--model", model, "--data", str(rows))["trained_tokens"] == 5
    assert as_json(capsys, "--model", model, "--data", str(rows), "--mask-prompt")["trained_tokens"] == 4
    assert main(["eval", "--model", model, "--data", lines, "--mask-prompt"]) == 2
    assert "lines.jsonl:1" in capsys.readouterr().err


def test_a_perplexity_beyond_numbers_is_infinite():
    """In JSON, which has no word for that, it is null."""
    figures = Evaluation(loss=800.0, token_accuracy=0.0, trained_tokens=3).to_json()
    assert figures["perplexity"] == math.inf and json.loads(dumps(figures))["perplexity"] is None


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_loss_that_is_no_number_is_one_clear_line(lines, tmp_path, capsys, flags):
    path = tiny_tokenizer.write(tmp_path / "model")
    config = small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE)
    weights = small.weights(config)
    weights["model.norm.weight"][3] = np.nan
    folder.save(path, config, weights, path)
    assert main(["eval", "--model", str(path), "--data", lines, *flags]) == 1
    out, error = capsys.readouterr()
    assert out == "" and "mesp-np eval: the loss is not a number (nan); the model's weights" in error


@pytest.mark.parametrize("width", [1, 20, 39])
def test_no_terminal_is_too_narrow_for_a_figure(model, lines, adapter_folder, monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    both = as_json(capsys, "--model", model, "--data", lines, "--adapter", adapter_folder)
    main(["eval", "--model", model, "--data", lines, "--adapter", adapter_folder])
    out = capsys.readouterr().out
    for figures in (both, both["base"]):
        for shown in (f"{figures['loss']:.4f}", f"{figures['perplexity']:.2f}", f"{figures['token_accuracy']:.2%}"):
            assert shown in out
    assert out.count("45") >= 2 and "trained tokens" in out


def test_the_arena_is_exactly_as_large_as_the_largest_batch_needs():
    config, weights = small.model_config(), small.weights(small.model_config())
    run = small.run_config(trainable="none")
    batches = InOrder(small.rows([([1] * length, [2] * length) for length in (3, 5, 13)]), 2, run.seq)
    extent = memory_needed(config, run, batches, weights)
    with small.Engine(config, weights, run, extent) as engine:
        found = evaluate(engine, batches)
        assert engine.arena.extent == extent
        assert found.loss == pytest.approx(sum(engine.loss(batch) * batch.trained_tokens for batch in batches)
                                           / found.trained_tokens)
