"""MLX's quantised folders: what loads, what it computes, and everything that can be wrong with one."""

import json

import numpy as np
import pytest

from mesp_np.checkpoint import folder, safetensors_file, weight_files
from mesp_np.checkpoint.weight_files import INDEX, WEIGHTS, part_names
from mesp_np.cli import main
from mesp_np.config import PRESETS
from mesp_np.errors import UserError
from mesp_np.ops.quant import Quantised, round_bf16
from mesp_np.params import phantom_weights
from tests import op_checks, quantised, small, tiny_tokenizer

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
EMBED, HEAD = "model.embed_tokens", "lm_head"
HEAD_PARTS = part_names("lm_head.weight")


def config_of(tied=True, **changes):
    return quantised.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, tie_word_embeddings=tied, **changes)


def written(path, weights, config, block=None):
    """A complete folder of these weights; `block` is what config.json says of them."""
    plain = path.with_name("plain")
    folder.save(plain, config, small.weights(config), tiny_tokenizer.write(path.with_name("tokenizer")))
    form = config.quantization
    folder.derive(path, plain, weights, {"quantization": block or {"bits": form.bits, "group_size": form.group_size}})
    return path


@pytest.fixture
def path(tmp_path):
    """A tied 4-bit model."""
    return written(tmp_path / "model", quantised.weights(config_of()), config_of())


def rewrite(path, change):
    """Alter the tensors of a folder, each keeping its own dtype."""
    tensors = dict(safetensors_file.read(path / WEIGHTS, packed=True))
    change(tensors)
    safetensors_file.write(path / WEIGHTS, tensors)


def reconfigure(path, **changes):
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | changes))


def same_weights(a, b):
    assert a.keys() == b.keys()
    for name, tensor in weight_files.unpack(a).items():
        op_checks.same_bits(tensor, weight_files.unpack(b)[name])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits, group", [(4, 32), (8, 32)])
@pytest.mark.parametrize("store", quantised.STORES)
def test_what_is_derived_is_what_loads(tmp_path, tied, bits, group, store):
    config = config_of(tied, bits=bits, group_size=group)
    weights = quantised.weights(config, store)
    loaded = folder.load(written(tmp_path / "model", weights, config))
    assert loaded.config == config and loaded.notes == () and list(loaded.weights) == list(config.weight_shapes())
    same_weights(loaded.weights, weights)
    assert not any(tensor.flags.writeable for tensor in weight_files.unpack(loaded.weights).values())
    assert sum(w.nbytes for w in loaded.weights.values()) == sum(w.nbytes for w in weights.values())


def results(config, weights, **changes):
    """Loss and every gradient's bytes."""
    run = small.run_config(**changes)
    plan = small.plan_step(config, run, weights=weights)
    with small.Engine(config, weights, run, plan.extent_bytes, poison=True) as engine:
        for p in engine.parameters:
            p.value[:] = p.value if run.trainable == "full" else 0.1
        batch = small.batch(config, 3, 13)
        loss, gradients = engine.loss(batch), engine.gradients(batch)
        engine.step([batch], rate=1e-3)
        assert engine.arena.ledger.events == plan.ledger.events
        return loss, {name: gradient.tobytes() for name, gradient in gradients.items()}


@pytest.mark.parametrize("changes", [dict(method="mesp-lean", loss="vocab:50"), dict(method="store", loss="rows:5"),
                                     dict(method="mebp", loss="full", threads=2), dict(trainable="full"),
                                     dict(dtype="float64")], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_on_codes_gives_the_bits_of_one_on_the_dense_weights(tmp_path, tied, changes):
    """Any method, either loss, any threads; and the plan of codes is the run."""
    config = config_of(tied)
    weights = quantised.weights(config)
    loaded = folder.load(written(tmp_path / "model", weights, config)).weights
    dense = quantised.widened(weights, changes.get("dtype", "float32"))
    assert results(config, loaded, **changes) == results(config, dense, **changes)


@pytest.mark.parametrize("bits", [4, 8])
def test_phantom_codes_have_the_shapes_and_the_bytes_of_the_file(tmp_path, bits):
    config = config_of(bits=bits)
    loaded = folder.load(written(tmp_path / "model", quantised.weights(config), config))
    phantoms = phantom_weights(loaded.config, np.float16)
    for name, stored in loaded.weights.items():
        assert type(stored) is type(phantoms[name])
        assert (stored.shape, stored.dtype, stored.nbytes) == \
            (phantoms[name].shape, phantoms[name].dtype, phantoms[name].nbytes)
    plans = [small.plan_step(loaded.config, small.run_config(), weights=weights)
             for weights in (loaded.weights, phantoms)]
    assert plans[0].ledger.events == plans[1].ledger.events


@pytest.mark.parametrize("preset, size", [("qwen2.5-0.5b", 277_996_288), ("qwen2.5-1.5b", 868_547_584),
                                          ("qwen2.5-3b", 1_736_187_904), ("qwen2.5-7b", 4_284_263_424)])
def test_published_sizes(tmp_path, preset, size, capsys):
    """The bytes of the 4-bit folders that people download, planned from a config.json alone."""
    block = {"bits": 4, "group_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[preset].to_json() | {"quantization": block}))
    assert main(["plan", "--model", str(tmp_path), "--batch-size", "1", "--seq", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frozen_weight_bytes"] == size


def test_overrides_and_modules_left_plain(tmp_path):
    """The embedding in 8 bits, one projection plain by the file alone, as MLX itself takes both."""
    config = config_of()
    weights = quantised.weights(config)
    plain = small.weights(config)
    weights[EMBED + ".weight"] = quantised.stored(plain[EMBED + ".weight"], 8, 32)
    weights[UP + ".weight"] = round_bf16(plain[UP + ".weight"])
    block = {"bits": 4, "group_size": 32, "mode": "affine", EMBED: {"bits": 8, "group_size": 32}}
    path = written(tmp_path / "model", weights, config, block)
    loaded = folder.load(path)
    same_weights(loaded.weights, weights)
    assert loaded.weights[EMBED + ".weight"].bits == 8
    assert results(config, loaded.weights) == results(config, quantised.widened(weights))
    reconfigure(path, quantization=block | {UP: False})
    same_weights(folder.load(path).weights, weights)


def test_shards_and_odd_byte_offsets(path):
    """One tensor's parts may be in two shards; a file that aligns nothing loads to the same bits."""
    whole = folder.load(path).weights
    tensors = sorted(safetensors_file.read(path / WEIGHTS, packed=True).items())
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name, part in zip(names, (tensors[::2], tensors[1::2])):
        safetensors_file.write(path / name, dict(part))
        content = (path / name).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = (length + 1).to_bytes(8, "little") + content[8:8 + length] + b" "
        (path / name).write_bytes(header + content[8 + length:])
    (path / WEIGHTS).unlink()
    (path / INDEX).write_text(json.dumps({"weight_map": {name: names[i % 2] for i, (name, _) in enumerate(tensors)}}))
    same_weights(folder.load(path).weights, whole)


@pytest.mark.parametrize("change, words", [
    (lambda t: t.pop(Q + ".scales"), f"{Q}.scales is missing"),
    (lambda t: t.pop(Q + ".biases"), f"{Q}.biases is missing"),
    (lambda t: t.pop(Q + ".bias"), f"{Q}.bias is missing"),
    (lambda t: t.pop(Q + ".weight"), f"{Q}.weight is missing"),
    (lambda t: t.update({Q + ".bias": t[Q + ".biases"]}), r"bias has shape \(96, 3\), expected \(96,\)"),
    (lambda t: t.update({Q + ".scales": t[Q + ".scales"][:, :2]}), r"scales has shape \(96, 2\), expected \(96, 3\)"),
    (lambda t: t.update({Q + ".weight": t[Q + ".weight"][:, :6]}), r"weight has shape \(96, 6\), expected \(96, 12\)"),
    (lambda t: t.update({Q + ".weight": np.zeros((96, 12), np.float32)}), "weight is stored as floats, expected U32"),
    (lambda t: t.update({Q + ".bias": np.zeros(96, np.uint32)}), "q_proj.bias is stored as U32, .*expected floats"),
    (lambda t: t.update({Q + ".biases": t[Q + ".biases"].astype(np.float32)}), "scales are F16, biases F32"),
    (lambda t: t.update({Q + ".zeros": np.zeros(3, np.float32)}), f"{Q}.zeros is unexpected"),
])
def test_wrong_parts_are_named(path, change, words):
    rewrite(path, change)
    with pytest.raises(UserError, match=words):
        folder.load(path)


def test_all_problems_are_told_together(path):
    def change(tensors):
        del tensors[Q + ".scales"], tensors["model.norm.weight"]
        tensors[UP + ".biases"] = tensors[UP + ".biases"][:5]
    rewrite(path, change)
    with pytest.raises(UserError, match="(?s)3 problems.*scales is missing.*norm.*missing.*up_proj.biases has shape"):
        folder.load(path)
    reconfigure(path, rope_theta=None)
    (path / WEIGHTS).write_bytes(b"")
    with pytest.raises(UserError, match="(?s)2 problems.*rope_theta is not there.*is empty"):
        folder.load(path)


def test_codes_in_a_folder_that_says_nothing_of_them(path):
    reconfigure(path, quantization=None)
    with pytest.raises(UserError, match="15 tensors such as .* are stored as U32, .* has no quantization"):
        folder.load(path)


def test_another_group_than_the_files(path):
    reconfigure(path, quantization={"bits": 4, "group_size": 64})
    with pytest.raises(UserError, match="(?s)problems.*q_proj.weight has rows of 96, which are no whole groups of 64"):
        folder.load(path)


def test_a_tied_head_is_the_embedding_and_counted_once(path):
    loaded = folder.load(path)
    with small.Engine(loaded.config, loaded.weights, small.run_config()) as engine:
        assert engine.model.params.head is engine.model.params.embed
    def add_head(tensors):
        tensors |= {name: tensors[twin] for name, twin in zip(HEAD_PARTS, part_names(EMBED + ".weight"))}
    rewrite(path, add_head)
    again = folder.load(path)
    same_weights(again.weights, loaded.weights)
    assert set(again.notes) == {f"{name} is ignored" for name in HEAD_PARTS}
    rewrite(path, lambda tensors: tensors.update({HEAD + ".scales": -tensors[HEAD + ".scales"]}))
    with pytest.raises(UserError, match="lm_head.scales differs from model.embed_tokens.scales"):
        folder.load(path)


def test_an_untied_head_that_is_missing(tmp_path):
    path = written(tmp_path / "model", quantised.weights(config_of(tied=False)), config_of(tied=False))
    rewrite(path, lambda tensors: [tensors.pop(name) for name in HEAD_PARTS])
    with pytest.raises(UserError, match="lm_head.weight is missing"):
        folder.load(path)


def test_derived_folders_are_like_their_source(tmp_path, path):
    """config.json key for key, companions copied, a key changed, a key removed; and nothing left of a failure."""
    plain = tmp_path / "plain"
    (plain / "LICENSE").write_text("free")
    (plain / "additional_chat_templates").mkdir()
    (plain / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    reconfigure(plain, _name_or_path="somewhere", bos_token_id=None)
    loaded = folder.load(plain)
    folder.derive(tmp_path / "like", plain, loaded.weights, {"torch_dtype": None, "eos_token_id": 7})
    before, after = (json.loads((at / "config.json").read_text()) for at in (plain, tmp_path / "like"))
    assert after == {key: value for key, value in before.items() if key != "torch_dtype"} | {"eos_token_id": 7}
    for name in ("LICENSE", "tokenizer.json", "generation_config.json", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "like" / name).read_bytes() == (plain / name).read_bytes()
    same_weights(folder.load(tmp_path / "like").weights, loaded.weights)

    class Broken:
        shape, dtype = (4, 4), np.dtype(np.float32)

        def __getitem__(self, rows):
            raise RuntimeError("no numbers")

    with pytest.raises(RuntimeError):
        folder.derive(tmp_path / "broken", plain, {"w": Broken()})
    assert not list(tmp_path.glob("*broken*"))


def test_a_quantised_weight_is_no_array_elsewhere(path):
    """An adapter's file must not hold codes."""
    with pytest.raises(UserError, match="is stored as U32 .packed integers, as in a quantised MLX model"):
        safetensors_file.read(path / WEIGHTS)
    assert isinstance(folder.load(path).weights[Q + ".weight"], Quantised)
