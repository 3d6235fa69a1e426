"""Models by name: the local cache, a download, and one clear line when there is neither."""

import json
import sys
from types import ModuleType

import pytest

from mesp_np.checkpoint import folder, hub
from mesp_np.cli import main
from mesp_np.errors import UserError
from tests import small, tiny_tokenizer

NAME, SNAPSHOT = "Owner/Tiny-0.1B", "0123abcd"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no huggingface_hub."""
    for variable in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home" / "hub"


def fill(cache, name=NAME, snapshot=SNAPSHOT):
    """Put a whole model into the cache, as huggingface_hub lays it out; returns its snapshot."""
    model = cache / f"models--{name.replace('/', '--')}"
    config = small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE)
    folder.save(model / "snapshots" / snapshot, config, small.weights(config),
                tiny_tokenizer.write(cache / "tokenizer"))
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(snapshot)
    return model / "snapshots" / snapshot


def pretend_library(monkeypatch, download):
    """A huggingface_hub whose snapshot_download is `download`."""
    library = ModuleType("huggingface_hub")
    library.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)


def test_a_cached_model_loads_by_its_name(cache, capsys):
    snapshot = fill(cache)
    assert folder.load(NAME).folder == snapshot
    assert main(["plan", "--model", NAME, "--seq", "8"]) == 0 and NAME in capsys.readouterr().out


def test_an_adapter_names_the_model_and_not_its_place_in_the_cache(cache, tmp_path, capsys):
    fill(cache)
    (tmp_path / "data.txt").write_text("some words to learn")
    flags = ["--model", NAME, "--data", str(tmp_path / "data.txt"), "--seq", "8", "--iters", "1", "--prompt", ""]
    assert main(["train", *flags, "--run-dir", str(tmp_path / "run")]) == 0
    adapter = tmp_path / "run" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    capsys.readouterr()
    assert main(["generate", "--model", NAME, "--adapter", str(adapter), "--prompt", "a", "--max-tokens", "1"]) == 0
    assert "was trained on" not in "".join(capsys.readouterr())
    assert folder.load(NAME).name == NAME and hub.name_of(tmp_path) == str(tmp_path)


def test_the_newest_snapshot_is_taken(cache):
    fill(cache, snapshot="old")
    newest = fill(cache, snapshot="new")
    assert hub.find(NAME) == newest


@pytest.mark.parametrize("variables, place", [
    ({"HF_HUB_CACHE": "a", "HF_HOME": "b", "XDG_CACHE_HOME": "c"}, "a"),
    ({"HF_HOME": "b", "XDG_CACHE_HOME": "c"}, "b/hub"), ({"XDG_CACHE_HOME": "c"}, "c/huggingface/hub"),
    ({"HOME": "d"}, "d/.cache/huggingface/hub"), ({"HF_HOME": "~/e", "HOME": "/f"}, "/f/e/hub")])
def test_where_the_cache_is(monkeypatch, variables, place):
    monkeypatch.delenv("HF_HOME")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(hub.cache_folder()) == place


def test_a_folder_goes_before_the_cache(cache, tmp_path):
    fill(cache)
    (tmp_path / NAME).mkdir(parents=True)
    assert str(hub.find(NAME)) == NAME


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_a_snapshot_that_is_not_whole_is_not_used(cache, lost):
    (fill(cache) / lost).unlink()
    with pytest.raises(UserError, match="not whole in .*pip install 'mesp-np.hub.'"):
        hub.find(NAME)


def test_a_plan_needs_no_weights(cache):
    (fill(cache) / "model.safetensors").unlink()
    assert main(["plan", "--model", NAME, "--seq", "8"]) == 0


def test_a_plan_of_half_a_download(cache, capsys):
    """GIVEN one of two shards WHEN a step is planned THEN as without any weights; with both they are read."""
    snapshot, plan = fill(cache), ["plan", "--model", NAME, "--seq", "8", "--method", "mesp-lean"]
    assert main(plan) == 0
    whole = capsys.readouterr().out
    first, second = (snapshot / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    (snapshot / "model.safetensors").rename(first)
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": first.name, "b": second.name}}))
    assert main(plan) == 0
    assert capsys.readouterr().out == whole
    second.touch()
    assert main(plan) == 1
    assert f"{second}: is empty" in capsys.readouterr().err


def test_a_missing_shard_is_downloaded(cache, monkeypatch):
    snapshot = fill(cache)
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}')
    pretend_library(monkeypatch, lambda *_, **__: "downloaded")
    assert str(hub.find(NAME)) == "downloaded"
    (snapshot / "model-00002-of-00002.safetensors").touch()
    assert hub.find(NAME) == snapshot


def test_what_is_downloaded(cache, monkeypatch):
    """Into the cache, and only what is read; for a plan config.json alone."""
    asked = []

    def download(name, allow_patterns, cache_dir):
        asked.append((name, allow_patterns))
        assert cache_dir == cache
        return str(fill(cache))

    pretend_library(monkeypatch, download)
    assert folder.load(NAME).config.vocab_size == tiny_tokenizer.VOCAB_SIZE
    (name, patterns), = asked
    assert name == NAME and {"config.json", "model*.safetensors", "tokenizer.json"} <= set(patterns)
    assert not any(pattern in ("*", "*.bin", "*.safetensors", "*.json") for pattern in patterns)
    folder.load(NAME)
    assert len(asked) == 1
    hub.find("Owner/Other", weights=False)
    assert asked[1] == ("Owner/Other", ["config.json"])


@pytest.mark.parametrize("error, words", [
    (OSError("No connection\nRequest ID: 7"), "(No connection)"), (ValueError("404 not found"), "(404 not found)"),
    (TimeoutError(), "(TimeoutError)")])
def test_a_failed_download_is_one_line(cache, monkeypatch, capsys, error, words):
    def download(*_, **__):
        raise error

    pretend_library(monkeypatch, download)
    assert main(["generate", "--model", NAME, "--prompt", "x"]) == 1
    told = capsys.readouterr().err
    assert f"{NAME}: no such folder, and it cannot be downloaded {words}" in told and told.count("\n") == 1


@pytest.mark.parametrize("name", ["nowhere", "../up/there", "/a/b", "a/b/c", "./x/y", "owner/.hidden", "owner/"])
def test_what_is_no_name_of_a_model(cache, name, monkeypatch):
    pretend_library(monkeypatch, lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(UserError, match="no such folder"):
        hub.find(name)
