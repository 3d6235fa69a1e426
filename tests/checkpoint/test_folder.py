"""Loading and saving a model's folder; everything that can be wrong with its weights."""

import errno
import json
from dataclasses import replace

import numpy as np
import pytest

from mesp_np.checkpoint import folder, safetensors_file
from mesp_np.checkpoint.weight_files import INDEX, WEIGHTS
from mesp_np.errors import UserError
from mesp_np.ops.quant import BF16, round_bf16
from tests import small, tiny_tokenizer

NORM, EMBED, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"


def config_of(tied):
    return small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, tie_word_embeddings=tied)


def saved(path, tied=True, dtype="f32"):
    """A complete folder; its weights as float32."""
    weights = small.weights(config_of(tied))
    folder.save(path, config_of(tied), weights, tiny_tokenizer.write(path.parent / "tokenizer"), dtype)
    return weights


def rewrite(path, change):
    """Alter the tensors of a saved folder."""
    tensors = dict(safetensors_file.read(path / WEIGHTS))
    change(tensors)
    safetensors_file.write(path / WEIGHTS, tensors, np.float32)


def shard(path, first, second):
    """Split a saved folder's weights into two files by their index in sorted order, and write the index."""
    tensors = sorted(safetensors_file.read(path / WEIGHTS).items())
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name, part in zip(names, (first, second), strict=True):
        safetensors_file.write(path / name, dict(tensors[part]), np.float32)
    weight_map = {name: names[index > 10] for index, (name, _) in enumerate(tensors)}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    (path / WEIGHTS).unlink()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_save_and_load(tmp_path, tied, dtype):
    weights = saved(tmp_path / "model", tied, dtype)
    checkpoint = folder.load(tmp_path / "model")
    assert checkpoint.config == config_of(tied) and checkpoint.notes == ()
    assert list(checkpoint.weights) == list(config_of(tied).weight_shapes())
    for name, array in checkpoint.weights.items():
        expected = {"bf16": round_bf16, "f16": np.float16, "f32": np.float32}[dtype](weights[name])
        assert array.dtype == expected.dtype and np.array_equal(array, expected)
    assert checkpoint.eos_ids == {tiny_tokenizer.EOS} == {checkpoint.tokenizer.eos_id}


def test_the_engine_runs_on_mapped_weights(tmp_path):
    """Read-only arrays from a file give the bits of the arrays that were written; misaligned ones too."""
    weights = saved(tmp_path / "model")
    losses = []
    path = tmp_path / "model" / WEIGHTS
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for stored in (weights, safetensors_file.read(path)):
        losses.append(loss(stored))
    path.write_bytes((length + 1).to_bytes(8, "little") + content[8:8 + length] + b" " + content[8 + length:])
    losses.append(loss(safetensors_file.read(path)))
    assert losses[0] == losses[1] == losses[2]


def loss(weights, config=None):
    config, run = config or config_of(True), small.run_config()
    plan = small.plan_step(config, run, weights=weights)
    with small.Engine(config, weights, run, plan.extent_bytes) as engine:
        return engine.loss(small.batch(config, 2, 9))


def test_sharded(tmp_path):
    weights = saved(tmp_path / "model")
    shard(tmp_path / "model", slice(0, 11), slice(11, None))
    loaded = folder.load(tmp_path / "model")
    assert all(np.array_equal(loaded.weights[name], weights[name]) for name in weights)
    size = sum(array.nbytes for array in weights.values())
    assert loaded.notes == (f"{INDEX} says 1 bytes, the shards have {size}",)          # which does no harm


def test_dtypes_may_be_mixed_and_the_config_in_either_layout(tmp_path):
    """Norms in f32 beside bf16 and f16 matrices; the same logits from a config.json of transformers 4 and 5."""
    weights = saved(tmp_path / "model")
    forms = [round_bf16, np.float16, np.float32]
    mixed = {name: forms[i % 3](array) for i, (name, array) in enumerate(weights.items())}
    safetensors_file.write(tmp_path / "model" / WEIGHTS, mixed)
    loaded = folder.load(tmp_path / "model")
    assert {array.dtype for array in loaded.weights.values()} == {BF16, np.dtype(np.float16), np.dtype(np.float32)}
    assert loss(loaded.weights) == pytest.approx(loss(weights), rel=1e-2)
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    theta = raw.pop("rope_theta")
    raw |= {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}, "dtype": raw.pop("torch_dtype"),
            "layer_types": ["full_attention"] * raw["num_hidden_layers"], "sliding_window": None, "pad_token_id": None}
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    assert folder.load(tmp_path / "model").config == loaded.config


def test_a_llama_folder(tmp_path):
    """Saved and loaded under its own name, without biases; the loss is that of a Qwen2 with biases of zero."""
    config = replace(config_of(True), qkv_bias=False)
    weights = small.weights(config)
    folder.save(tmp_path / "model", config, weights, tiny_tokenizer.write(tmp_path / "tokenizer"), "f32")
    loaded = folder.load(tmp_path / "model")
    assert loaded.config == config and loaded.weights.keys() == weights.keys()
    zeros = {name: np.zeros(shape, np.float32) for name, shape in config_of(True).weight_shapes().items()}
    assert loss(loaded.weights, config) == loss(zeros | weights)


def test_problems_of_config_and_weights_are_told_together(tmp_path):
    saved(tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | {"rope_theta": None, "hidden_act": "gelu"}))
    (tmp_path / "model" / WEIGHTS).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UserError, match="(?s)2 problems.*gelu.*rope_theta is not there.*Git LFS pointer"):
        folder.load(tmp_path / "model")


def test_shards_that_are_missing_cut_off_or_overlap(tmp_path):
    saved(tmp_path / "model")
    shard(tmp_path / "model", slice(0, 11), slice(10, None))
    with pytest.raises(UserError, match="is in 2 shards"):
        folder.load(tmp_path / "model")
    first, second = sorted((tmp_path / "model").glob("model-*"))
    whole = second.read_bytes()
    second.write_bytes(whole[:-4])
    with pytest.raises(UserError) as raised:
        folder.load(tmp_path / "model")
    assert str(raised.value).startswith(f"{second}: is cut off") and str(raised.value).count("; ") == 1
    first.write_bytes(first.read_bytes()[:-4])
    second.unlink()
    with pytest.raises(UserError, match=r"(?s)2 problems; download[^;]*\n  model-00001[^;]*is cut off"
                                        r"[^;]*\n  model-00002[^;]*cannot be read[^;]*$"):
        folder.load(tmp_path / "model")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "", "..", "\0", "\ud800",
                                  7, ["x"]])
def test_an_index_must_not_lead_out_of_its_folder(tmp_path, name):
    saved(tmp_path / "model")
    (tmp_path / "model" / WEIGHTS).rename(tmp_path / "outside.safetensors")
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {NORM: name}}))
    with pytest.raises(UserError, match="is no file of this folder|Is a directory"):
        folder.load(tmp_path / "model")


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{"])
def test_index_without_a_map(tmp_path, index):
    saved(tmp_path / "model")
    (tmp_path / "model" / WEIGHTS).unlink()
    (tmp_path / "model" / INDEX).write_text(index)
    with pytest.raises(UserError, match="index.json"):
        folder.load(tmp_path / "model")


def test_all_wrong_tensors_are_told_together(tmp_path):
    saved(tmp_path / "model")
    def change(tensors):
        del tensors[NORM]
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((3, 3), np.float32)
        tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros(2, np.float32)
    rewrite(tmp_path / "model", change)
    with pytest.raises(UserError) as raised:
        folder.load(tmp_path / "model")
    for words in ("3 problems", f"{NORM} is missing", "model.layers.9.mlp.up_proj.weight is unexpected",
                  "q_proj.weight has shape (3, 3), expected (48, 48)"):
        assert words in str(raised.value)


def test_old_rotary_tensors_are_ignored(tmp_path):
    saved(tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path / "model", lambda tensors: tensors.update({name: np.ones(4, np.float32)}))
    checkpoint = folder.load(tmp_path / "model")
    assert checkpoint.notes == (f"{name} is ignored",) and name not in checkpoint.weights


def test_tied_head(tmp_path):
    saved(tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensors: tensors.update({HEAD: tensors[EMBED]}))
    checkpoint = folder.load(tmp_path / "model")
    assert checkpoint.notes == (f"{HEAD} is ignored",) and HEAD not in checkpoint.weights
    rewrite(tmp_path / "model", lambda tensors: tensors.update({HEAD: tensors[EMBED] + 1}))
    with pytest.raises(UserError, match="lm_head.weight differs from model.embed_tokens.weight"):
        folder.load(tmp_path / "model")


def test_untied_head_must_be_there(tmp_path):
    saved(tmp_path / "model", tied=False)
    rewrite(tmp_path / "model", lambda tensors: tensors.pop(HEAD))
    with pytest.raises(UserError, match="lm_head.weight is missing"):
        folder.load(tmp_path / "model")


def test_folders_without_weights(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        folder.load(tmp_path / "nowhere")
    saved(tmp_path / "model")
    (tmp_path / "model" / WEIGHTS).rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UserError, match="has no model.safetensors; pytorch_model.bin is not read"):
        folder.load(tmp_path / "model")


@pytest.mark.parametrize("generation, config, expected", [
    ({"eos_token_id": [3, 5]}, 7, {3, 5}), ({"eos_token_id": 3}, 7, {3}), ({}, 7, {7}), (None, [7, 8], {7, 8}),
    (None, None, set())])
def test_eos_ids(tmp_path, generation, config, expected):
    saved(tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | {"eos_token_id": config}))
    (tmp_path / "model" / "generation_config.json").unlink()
    if generation is not None:
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    assert folder.load(tmp_path / "model").eos_ids == expected


def test_wrong_eos_id(tmp_path):
    saved(tmp_path / "model")
    for value in ("x", -1, 10 ** 30, [3, -1]):
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(UserError, match="generation_config.json: eos_token_id is"):
            folder.load(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": -1}))
    with pytest.raises(UserError, match="/config.json: eos_token_id is"):
        folder.load(tmp_path / "model")


def test_saving_over_the_folder_that_is_mapped(tmp_path):
    weights = saved(tmp_path / "model")
    path = tmp_path / "model"
    (path / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    checkpoint = folder.load(path)
    folder.save(path, checkpoint.config, checkpoint.weights, path, "f32")
    assert all(np.array_equal(checkpoint.weights[name], weights[name]) for name in weights)
    again = folder.load(path)
    assert all(np.array_equal(again.weights[name], weights[name]) for name in weights)
    assert again.eos_ids == {256, 258}


def test_folders_among_the_companions_are_left_out(tmp_path):
    """As of a model that comes with LICENSES/; a licence that is a file is copied."""
    saved(tmp_path / "model")
    for name in ("LICENSES", "NOTICES"):
        (tmp_path / "model" / name).mkdir()
        (tmp_path / "model" / name / "MIT.txt").write_text("MIT")
    (tmp_path / "model" / "LICENSE.txt").write_text("mine")
    weights = folder.load(tmp_path / "model").weights
    folder.derive(tmp_path / "derived", tmp_path / "model", weights)
    folder.save(tmp_path / "saved", config_of(True), weights, tmp_path / "model")
    for out in ("derived", "saved"):
        assert (tmp_path / out / "LICENSE.txt").read_text() == "mine"
        assert not list((tmp_path / out).glob("*S"))


def test_a_companion_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    saved(tmp_path / "model")
    checkpoint, companion = folder.load(tmp_path / "model"), tmp_path / "model" / "tokenizer.json"

    def refuse(path, copy):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(folder.shutil, "copyfile", refuse)
    with pytest.raises(UserError, match=f"/out: cannot be written .{companion}: Permission denied.*ask for permission"):
        folder.derive(tmp_path / "out", tmp_path / "model", checkpoint.weights)
    assert not (tmp_path / "out").exists()


def test_default_folder():
    assert (folder.default_folder() / "tokenizer.json").is_file()
