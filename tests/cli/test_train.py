"""mesp-np train: what it writes, that it is repeatable, and that it stops well."""

import errno
import json
import math
import re

import pytest

from mesp_np import RunConfig, __version__, load, plan_step
from mesp_np import train as train_module
from mesp_np.checkpoint import adapter, folder
from mesp_np.cli import main
from mesp_np.data import rows as data_rows
from mesp_np.errors import UserError
from mesp_np.train import Run
from tests import small, tiny_tokenizer
from tests.training import log, train

BYTES = {"live_peak_bytes", "extent_bytes", "os_growth_bytes", "resident_bytes"}
KEYS = {"step", "loss", "lr", "grad_norm", "trained_tokens", "seconds"} | BYTES
def test_run_folder(model, data, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(model, data, run, "--iters", "8", "--lr", "0.01", "--eval-every", "4", "--save-every", "3") == 0
    lines = log(run)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert all(KEYS <= set(line) for line in lines)
    assert all(isinstance(line[key], int) for line in lines for key in BYTES)
    assert math.isclose(lines[3]["valid_perplexity"], math.exp(lines[3]["valid_loss"]))
    settings = json.loads((run / "config.json").read_text())
    assert settings["rank"] == 2 and settings["iters"] == 8 and settings["method"] == "mesp-lean"
    assert (settings["data"], settings["adapter"], settings["version"]) == (data, None, __version__)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["valid_loss_after"] < summary["valid_loss_before"]
    assert all(summary[key] == lines[-1][key] for key in BYTES)
    assert summary["resident_bytes"] > (summary["weight_resident_bytes"] or 0)
    assert (run / "adapter" / "adapter_model.safetensors").exists()
    assert {path.name for path in run.iterdir()} == {"adapter", "config.json", "log.jsonl", "summary.json"}
    out = capsys.readouterr().out
    assert "valid loss" in out and "sample after" in out and "MiB: live peak" in out


def test_logged_bytes_are_the_plans(model, data, tmp_path):
    assert train(model, data, tmp_path / "run", "--iters", "3") == 0
    checkpoint, settings = load(model), json.loads((tmp_path / "run" / "config.json").read_text())
    chosen = {name: settings[name] for name in settings["chosen"]}
    run = RunConfig(seq=32, batch_size=2, rank=2, **chosen)
    peaks = {plan_step(checkpoint.config, run, (2, T), checkpoint.weights).live_peak_bytes for T in (16, 32)}
    assert {line["live_peak_bytes"] for line in log(tmp_path / "run")} <= peaks


@pytest.mark.parametrize("flags", [[], ["--method", "mezo", "--optimizer", "sgd"], ["--grad-accumulation", "3"],
                                   ["--update", "fused"]], ids=str)
def test_same_seed_same_bytes(model, data, tmp_path, flags):
    adapters = []
    for name, threads in (("a", "1"), ("b", "2")):
        assert train(model, data, tmp_path / name, "--iters", "4", *flags, "--threads", threads) == 0
        adapters.append((tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes())
    assert adapters[0] == adapters[1]


def test_another_seed_other_bytes(model, data, tmp_path):
    adapters = []
    for seed in ("1", "2"):
        train(model, data, tmp_path / seed, "--iters", "2", "--seed", seed)
        adapters.append((tmp_path / seed / "adapter" / "adapter_model.safetensors").read_bytes())
    assert adapters[0] != adapters[1]


def test_start_from_an_adapter(model, data, tmp_path):
    train(model, data, tmp_path / "a", "--iters", "6", "--lr", "0.01")
    assert train(model, data, tmp_path / "b", "--iters", "2", "--adapter", str(tmp_path / "a" / "adapter")) == 0
    after, before = (json.loads((tmp_path / name / "summary.json").read_text())[key] for name, key in
                     (("a", "valid_loss_after"), ("b", "valid_loss_before")))
    assert math.isclose(after, before, rel_tol=1e-6)


def test_full_training_writes_a_model(model, data, tmp_path):
    run = tmp_path / "run"
    assert train(model, data, run, "--trainable", "full", "--iters", "2", "--method", "mebp") == 0
    assert main(["plan", "--model", str(run / "model"), "--json"]) == 0
    assert {array.dtype.name for array in load(run / "model").weights.values()} == {"float32"}


def test_validation_is_a_mean_over_tokens(model, tmp_path):
    """Three rows of unequal length and loss: their mean is the same however they are put into batches."""
    lines = ["a", "the cat sat on the mat", "zzzzzzzzzz 0123456789"]
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    losses = []
    for size in ("1", "2", "3"):
        run = tmp_path / size
        assert train(model, str(tmp_path), run, "--iters", "1", "--batch-size", size, "--sample-tokens", "0") == 0
        summary = json.loads((run / "summary.json").read_text())
        losses.append(summary["valid_loss_before"])
        assert summary["sample_before"] is summary["sample_after"] is None
    assert math.isclose(losses[0], losses[2], rel_tol=1e-5) and math.isclose(losses[1], losses[2], rel_tol=1e-5)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A folder with a chat template, in which generation stops at the end of text only."""
    path = tiny_tokenizer.write(tmp_path_factory.mktemp("chat"), chat_template=tiny_tokenizer.CHATML)
    config = small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, max_position_embeddings=256)
    folder.save(path, config, small.weights(config), path)
    return str(path)


def chats(tmp_path, *rows):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": answer}) + "\n" for prompt, answer in rows))
    return str(path)


def test_answers_only(chat_model, tmp_path, capsys):
    """Each answer of three bytes has four targets; what is said and written agrees, and one row is shown."""
    data = chats(tmp_path, *[("Hi", "xxx")] * 3)
    run = tmp_path / "run"
    assert train(chat_model, data, run, "--iters", "2", "--batch-size", "2", "--seq", "128", "--mask-prompt") == 0
    assert [line["trained_tokens"] for line in log(run)] == [8, 8]
    settings = json.loads((run / "config.json").read_text())
    assert settings["mask_prompt"] is True and settings["packing"] is False and settings["eos"] is True
    assert settings["prompt"].endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")
    out = capsys.readouterr().out
    assert "2 rows," in out and "3 completion; 0 cut at 128" in out
    assert "<|im_start|>assistant\n[[xxx" in out and "<|im_end|>]]" in out
    assert "conversations end a turn with <|im_end|>, but generation stops at <|endoftext|>" in out


def test_a_prompt_is_the_users_turn_of_a_conversation(chat_model, tmp_path):
    data = chats(tmp_path, *[("Hi", "Yo")] * 3)
    assert train(chat_model, data, tmp_path / "run", "--iters", "1", "--seq", "128", "--prompt", "Why?") == 0
    prompt = json.loads((tmp_path / "run" / "config.json").read_text())["prompt"]
    assert prompt.endswith("user\nWhy?<|im_end|>\n<|im_start|>assistant\n")


def test_answers_beyond_the_length_never_reach_the_optimizer(chat_model, tmp_path, capsys):
    """Rows without a target are skipped and told; a set of nothing else, for training or validation, is an error."""
    long, fits = ("x" * 100, "yes"), ("x", "yes")
    flags = "--iters", "2", "--seq", "96", "--mask-prompt"
    assert train(chat_model, chats(tmp_path, long, fits, fits), tmp_path / "run", *flags) == 0
    assert "1 skipped, no token to train within 97: " in capsys.readouterr().out
    assert all(line["trained_tokens"] == 4 and math.isfinite(line["loss"]) for line in log(tmp_path / "run"))
    assert train(chat_model, chats(tmp_path, long, long), tmp_path / "none", *flags) == 1
    error = capsys.readouterr().err
    assert "no row can be trained" in error and "chats.jsonl:1" in error and "chats.jsonl:2" in error
    for name, rows in (("train", [fits]), ("valid", [long])):
        (tmp_path / f"{name}.jsonl").write_text(open(chats(tmp_path, *rows)).read())
    assert train(chat_model, str(tmp_path), tmp_path / "none", *flags) == 1
    assert "valid.jsonl:1" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_packed_rows_have_the_loss_of_rows_alone(model, tmp_path, capsys):
    lines = ["a cat", "the cat sat on the mat", "zzzz", "0123456789", "no"]
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    losses = []
    for name, flags in (("alone", []), ("packed", ["--packing"])):
        assert train(model, str(tmp_path), tmp_path / name, "--iters", "2", "--lr", "0.01", *flags) == 0
        losses.append(json.loads((tmp_path / name / "summary.json").read_text())["valid_loss_before"])
    assert math.isclose(*losses, rel_tol=1e-6)
    assert "5 rows packed into 2" in capsys.readouterr().out


def test_bad_rows_are_refused_or_told(model, data, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(open(data).read() + '{"text": 3}\n{"text": "a"} {}\n')
    assert train(model, str(path), tmp_path / "run", "--iters", "1", "--max-bad-rows", "1") == 1
    error = capsys.readouterr().err
    assert "bad.jsonl:25: \"text\" is 3" in error and "bad.jsonl:26: not one JSON object" in error
    assert not (tmp_path / "run").exists()
    assert train(model, str(path), tmp_path / "run", "--iters", "1", "--max-bad-rows", "2") == 0
    assert "2 bad rows skipped: " in capsys.readouterr().out


def test_no_eos(model, data, tmp_path, capsys):
    assert train(model, data, tmp_path / "run", "--iters", "1", "--no-eos") == 0
    out = capsys.readouterr().out
    assert "mat]]" in out and "mat<|endoftext|>]]" not in out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["eos"] is False


@pytest.mark.parametrize("method", ["mesp-lean", "store", "mezo"])
def test_accumulation_over_rows_of_all_lengths(model, tmp_path, method):
    """Windows mix the shapes (B, T) in any order, and all fit in the memory of the largest."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": "cat " * count}) + "\n" for count in range(1, 15)))
    assert train(model, str(tmp_path / "data.jsonl"), tmp_path / "run", "--epochs", "3", "--grad-accumulation", "3",
                 "--seq", "60", "--batch-size", "3", "--method", method, "--sample-tokens", "0") == 0
    assert len({line["live_peak_bytes"] for line in log(tmp_path / "run")}) > 1


def test_budget_that_is_too_small(model, data, tmp_path, capsys):
    assert train(model, data, tmp_path / "run", "--iters", "2", "--memory-budget", "10KiB") == 1
    assert "--memory-budget is 10,240 B" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_full_disk_leaves_the_adapter_that_was_saved_before(model, data, tmp_path, capsys, monkeypatch, full_disk):
    """The second save fails at several places; the first adapter, and nothing half-written, is what is left."""
    save, found = Run._save, []

    def save_on_a_full_disk(self, engine):
        if engine.steps == 1:
            return save(self, engine)
        before = [(path.name, path.read_bytes()) for path in sorted((self.run_dir / "adapter").iterdir())]
        for size in (0, 100, 3000):
            with full_disk(size), pytest.raises(UserError) as raised:
                save(self, engine)
            assert [(path.name, path.read_bytes()) for path in sorted((self.run_dir / "adapter").iterdir())] == before
        found.extend(before)
        raise raised.value

    monkeypatch.setattr(Run, "_save", save_on_a_full_disk)
    assert train(model, data, tmp_path / "run", "--iters", "4", "--save-every", "1") == 1
    error = capsys.readouterr().err
    assert re.search(r"/run/adapter/\S+: cannot be written \(File too large\); what was there is unchanged", error)
    assert len(found) == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"adapter", "config.json", "log.jsonl"}
    monkeypatch.undo()
    assert train(model, data, tmp_path / "again", "--iters", "1", "--adapter", str(tmp_path / "run" / "adapter")) == 0


def test_a_log_that_cannot_be_written_is_one_clear_line(model, data, tmp_path, capsys, monkeypatch, full_disk):
    write = Run._log

    def log_on_a_full_disk(self, engine, record):
        with full_disk(300):
            write(self, engine, record)

    monkeypatch.setattr(Run, "_log", log_on_a_full_disk)
    assert train(model, data, tmp_path / "run", "--iters", "9", "--save-every", "1") == 1
    error = capsys.readouterr().err
    assert "log.jsonl: cannot be written (File too large); its last line may be cut off; free some space" in error
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"adapter", "config.json", "log.jsonl"}


@pytest.mark.parametrize("logged", [0, 3])
def test_what_was_trained_is_saved_when_the_log_cannot_be_written(model, data, tmp_path, capsys, monkeypatch, logged):
    """The adapter is that of the step whose line is missing, even when there is no line at all."""
    append = train_module.dumps

    def dumps(record):
        if record["step"] > logged:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(record)

    flags = "--schedule", "constant", "--warmup", "0"
    monkeypatch.setattr(train_module, "dumps", dumps)
    assert train(model, data, tmp_path / "run", *flags, "--iters", "9") == 1
    out, error = capsys.readouterr()
    assert "log.jsonl: cannot be written (No space left" in error and f"saved after step {logged + 1}" in out
    assert len(log(tmp_path / "run")) == logged
    monkeypatch.undo()
    assert train(model, data, tmp_path / "good", *flags, "--iters", str(logged + 1)) == 0
    saved = [(tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes() for run in ("run", "good")]
    assert saved[0] == saved[1]


@pytest.mark.parametrize("name, left", [
    ("config.json", None), ("summary.json", {"adapter", "config.json", "log.jsonl"})])
def test_a_full_disk_leaves_no_half_written_json(model, data, tmp_path, capsys, monkeypatch, full_disk, name, left):
    write = Run._write

    def write_on_a_full_disk(self, file, value):
        with full_disk(100 if file == name else 10 ** 6):
            write(self, file, value)

    monkeypatch.setattr(Run, "_write", write_on_a_full_disk)
    assert train(model, data, tmp_path / "run", "--iters", "2") == 1
    assert f"{name}: cannot be written (File too large)" in capsys.readouterr().err
    assert (tmp_path / "run").exists() == bool(left)
    assert not left or {path.name for path in (tmp_path / "run").iterdir()} == left


def test_a_run_cannot_be_put_over_the_adapter_it_starts_from(model, data, tmp_path, capsys):
    assert train(model, data, tmp_path / "run", "--iters", "1") == 0
    start = tmp_path / "run" / "adapter"
    before = [path.read_bytes() for path in sorted(start.iterdir())]
    for place in (tmp_path / "run", start):
        assert train(model, data, place, "--iters", "1", "--lr", "0.1", "--adapter", str(start)) == 1
        assert f"{place}: is not empty" in capsys.readouterr().err
    assert [path.read_bytes() for path in sorted(start.iterdir())] == before
    assert train(model, data, tmp_path / "other", "--iters", "1", "--adapter", str(start)) == 0


def test_adapter_of_another_model(model, data, tmp_path, capsys):
    with small.engine(small.model_config(hidden_size=32), rank=2) as other:
        adapter.save(tmp_path / "adapter", other.parameters, other.run, "another")
    assert train(model, data, tmp_path / "run", "--iters", "4", "--adapter", str(tmp_path / "adapter")) == 1
    assert "the adapter does not fit this run" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("flags", [["--method", "magic"], ["--keep", "x,foo"], ["--layers", "7"]], ids=" ".join)
def test_wrong_settings_are_told_before_the_data_is_read(model, data, tmp_path, capsys, monkeypatch, flags):
    monkeypatch.setattr(data_rows, "load", None)
    assert train(model, data, tmp_path / "run", *flags) == 2
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("flags, code, words", [
    (["--method", "magic"], 2, "choose from store"), (["--keep", "x,foo"], 2, "foo"),
    (["--loss", "rows:0"], 2, "--loss"), (["--warmup", "-1"], 2, "--warmup"), (["--betas"], 2, "--betas"),
    (["--lr", "-1"], 2, "--lr"), (["--iters", "5", "--epochs", "2"], 2, "--iters or --epochs"),
    (["--targets", "q_proj,z_proj"], 2, "z_proj"), (["--update", "fused", "--clip", "1"], 2, "fused"),
    (["--threads", "999"], 2, "cores"), (["--rank", "0"], 2, "--rank"), (["--seed", "-1"], 2, "--seed"),
    (["--data", "/nowhere.jsonl"], 1, "/nowhere.jsonl"), (["--model", "/nowhere"], 1, "/nowhere"),
    (["--adapter", "/nowhere"], 1, "/nowhere"), (["--dtype", "float16"], 2, "float16"),
    (["--mask-prompt"], 2, "text.jsonl:1 is a text"), (["--max-bad-rows", "-1"], 2, "--max-bad-rows"),
    (["--epochs", "1e300"], 2, "--epochs is 1e+300; it must be 0 to 1e+15"),
    (["--epochs", "nan"], 2, "--epochs is nan"),
    (["--no-such-flag"], 2, "no-such"), (["--memory-budget", "abc"], 2, "is no size"),
], ids=str)
def test_bad_input_is_one_clear_line(model, data, tmp_path, capsys, flags, code, words):
    try:
        got = train(model, data, tmp_path / "run", *flags)
    except SystemExit as exit:                       # argparse
        got = exit.code
    error = capsys.readouterr().err.strip()
    assert got == code and words in error.splitlines()[-1]
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_an_adapter_does_not_go_with_every_weight(model, data, tmp_path, capsys):
    train(model, data, tmp_path / "a", "--iters", "1")
    assert train(model, data, tmp_path / "b", "--adapter", str(tmp_path / "a" / "adapter"), "--trainable", "full") == 2
    assert "--trainable full" in capsys.readouterr().err and not (tmp_path / "b").exists()


def test_run_folder_in_use(model, data, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("precious")
    assert train(model, data, tmp_path / "run", "--iters", "2") == 1
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_no_parent_folder_is_left_either(model, data, tmp_path):
    (tmp_path / "adapter").mkdir()
    assert train(model, data, tmp_path / "runs" / "today", "--adapter", str(tmp_path / "adapter")) == 1
    assert train(model, data, tmp_path / "runs" / "today", "--method", "mezo", "--mezo-eps", "1e30") == 1
    assert not (tmp_path / "runs").exists()


def test_a_validation_may_be_of_some_batches_only(model, tmp_path, capsys):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{"ab" * n}"}}\n' for n in range(1, 6)))
    losses = []
    for given in ("1", "0", "1"):
        out = tmp_path / f"run{len(losses)}"
        assert main(["train", "--model", model, "--data", str(tmp_path), "--run-dir", str(out), "--iters", "1", "--seq",
                     "24", "--batch-size", "1", "--sample-tokens", "0", "--eval-batches", given, "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["valid_loss_before"])
    assert losses[0] == losses[2] != losses[1]
