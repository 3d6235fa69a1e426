"""config.json in both layouts, what is refused by name, and that nonsense never ends in a traceback."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from mesp_np.config import PRESETS, ModelConfig, RunConfig
from mesp_np.config_json import Quantization
from mesp_np.engine import Engine, plan_setup
from mesp_np.errors import UsageError, UserError
from mesp_np.generate import generator
from tests import small

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "head_dim", "max_position_embeddings")
V4 = {"model_type": "qwen2", "hidden_act": "silu", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
      "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
      "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
      "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 70}
V5 = {key: value for key, value in V4.items() if key not in ("rope_theta", "torch_dtype")} | {
    "dtype": "bfloat16", "layer_types": ["full_attention"] * 24, "sliding_window": None,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}
KEYS = (*SIZES, "model_type", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
        "tie_word_embeddings", "use_sliding_window", "layer_types", "quantization", "quantization_config")
NONSENSE = (None, "x", "", [], ["x"], [[]], {}, {"x": [1]}, {"rope_type": []}, {"rope_theta": "x"}, -1, 0, 1.5, -0.5,
            10 ** 400, 1e300, True, False, math.nan, math.inf)


@pytest.mark.parametrize("raw", [V4, V5], ids=["v4", "v5"])
def test_both_layouts(raw):
    assert ModelConfig.from_json(raw) == PRESETS["qwen2.5-0.5b"]


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_written_is_what_is_read(preset):
    assert ModelConfig.from_json(json.loads(json.dumps(PRESETS[preset].to_json()))) == PRESETS[preset]


@pytest.mark.parametrize("raw", [V4, V5], ids=["v4", "v5"])
@pytest.mark.parametrize("key", KEYS)
def test_nonsense_is_refused_by_name(raw, key):
    """Each key with each wrong value: a usable config, or a line that names the file and the key."""
    for value in NONSENSE:
        try:
            made = ModelConfig.from_json(raw | {key: value}, "here/config.json")
        except UserError as error:
            assert str(error).startswith("here/config.json: ") and ("\n" not in str(error) or type(value) is dict)
            assert any(word in str(error) for word in (key, "rope type", "rope_theta", "head")), error
        else:
            assert all(type(getattr(made, size)) is int and getattr(made, size) > 0 for size in SIZES)
            assert 0 < made.rope_theta < math.inf and 0 < made.rms_norm_eps < math.inf
            assert type(made.tie_word_embeddings) is bool


@pytest.mark.parametrize("key", KEYS)
def test_an_absent_key(key):
    """GIVEN one key fewer WHEN read THEN the default of transformers, or a line that names the key; theta has none."""
    raw = {name: value for name, value in V4.items() if name != key}
    if key in ("model_type", "rope_theta", "rms_norm_eps", *SIZES[:5]):
        with pytest.raises(UserError, match=key):
            ModelConfig.from_json(raw)
    else:
        ModelConfig.from_json(raw)


@pytest.mark.parametrize("changes, words", [
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling: rope type is 'yarn'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope type is 'linear'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type is 'dynamic'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type is 'llama3'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters: rope type is 'yarn'"),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"rope_theta": None}, "rope_theta is not there"),
    ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "rope_theta is not there"),
    ({"rope_parameters": [1e6]}, "rope_parameters is"), ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"layer_types": "full_attention"}, "layer_types"), ({"use_sliding_window": True}, "use_sliding_window is True"),
    ({"model_type": "gpt2"}, "model_type is 'gpt2', expected qwen2 or llama"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias is True"),
    ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True"),
    ({"hidden_act": "gelu"}, "'gelu'"), ({"head_dim": 7}, "head_dim is 7, expected an even"),
    ({"num_key_value_heads": 4}, "a multiple of num_key_value_heads 4"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
], ids=str)
def test_what_is_not_computed_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        ModelConfig.from_json(V4 | changes)


@pytest.mark.parametrize("block, words", [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quantised by gptq"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "quantised by awq"),
    ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "quantised by bitsandbytes nf4"),
    ({"quant_method": "fp8"}, "quantised by fp8"), ({"quant_method": "mxfp4"}, "quantised by mxfp4"),
    ({"quant_method": "compressed-tensors"}, "quantised by compressed-tensors"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantised by modelopt NVFP4"),
    ({"mode": "mxfp4", "bits": 4, "group_size": 32}, "quantised by mxfp4"),
    ({"mode": "nvfp4", "bits": 4, "group_size": 16}, "quantised by nvfp4"),
    ({"bits": 4}, "group_size None"), ({"bits": 3, "group_size": 64}, "bits 3"),
    ({"bits": 4, "group_size": 16}, "group_size 16"), ({"bits": 4.0, "group_size": 64}, "bits 4.0"),
    ({"bits": 4, "group_size": 64, "lm_head": {"bits": 8}}, "of lm_head: bits 8 and group_size None"),
    ({"bits": 4, "group_size": 64, "lm_head": {"bits": 8, "group_size": 32, "mode": "mxfp8"}}, "of lm_head is"),
    ({"bits": 4, "group_size": 64, "symmetric": "yes"}, "of symmetric is 'yes'"),
], ids=str)
@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_other_quantisations_are_refused_by_name(key, block, words):
    with pytest.raises(UserError, match=words):
        ModelConfig.from_json(V4 | {key: block})


@pytest.mark.parametrize("block", [{"bits": 4, "group_size": 64}, {"bits": 4, "group_size": 64, "mode": "affine"}])
@pytest.mark.parametrize("keys", [["quantization"], ["quantization_config"], ["quantization", "quantization_config"]])
def test_the_affine_form_of_mlx(keys, block):
    overrides = {"model.embed_tokens": {"bits": 8, "group_size": 32}, "lm_head": False,
                 "model.layers.0.mlp.up_proj": True}
    found = ModelConfig.from_json(V4 | dict.fromkeys(keys, block | overrides)).quantization
    modules = (*overrides, "model.layers.3.self_attn.q_proj")
    assert [found.of(module) for module in modules] == [(8, 32), None, (4, 64), (4, 64)]
    assert found == Quantization(4, 64, (("model.embed_tokens", (8, 32)), ("lm_head", None)))


def test_all_problems_are_told_together():
    wrong = {"model_type": "gpt2", "rope_scaling": {"type": "yarn"}, "hidden_size": None, "quantization": {"bits": 2}}
    with pytest.raises(UserError, match="(?s)4 problems.*model_type.*hidden_size is not there.*yarn.*bits 2"):
        ModelConfig.from_json(V4 | wrong)


@pytest.mark.parametrize("changes, theta", [
    ({"rope_scaling": {"type": "default"}}, 1e6), ({"rope_scaling": None, "rope_parameters": None}, 1e6),
    ({"rope_parameters": {"type": "default", "rope_theta": 5e5}}, 5e5), ({"rope_theta": 10000}, 1e4),
    ({"rope_parameters": {"rope_theta": None}}, 1e6), ({"rope_scaling": {}}, 1e6),
    ({"sliding_window": 4096, "max_window_layers": 21}, 1e6),          # there, and not in use
    ({"attention_bias": False, "mlp_bias": None, "max_window_layers": 0}, 1e6),
], ids=str)
def test_what_loads(changes, theta):
    assert ModelConfig.from_json(V4 | changes).rope_theta == theta


TINY = small.model_config(rope_theta=1e6).to_json()
TEXT = list(range(20, 30))


def logits(ids=TEXT, without=(), **changes):
    """What the small model computes after these ids, as bytes, when its config.json is changed."""
    raw = {key: value for key, value in TINY.items() if key not in without} | changes
    config, run = ModelConfig.from_json(raw), small.run_config(trainable="none")
    weights = small.weights(config)
    with Engine(config, weights, run, plan_setup(config, run, weights)) as engine:
        return generator(engine, len(ids)).logits(ids).tobytes()


def test_every_layout_of_the_rope_base_gives_the_same_logits():
    """At the top, in rope_parameters, and beside an empty rope_scaling; another base, wherever it is, gives others."""
    inside = {"rope_theta": 1e6, "rope_type": "default"}
    assert logits(rope_scaling=None) == logits(without=["rope_theta"], rope_parameters=inside) == logits()
    others = logits(rope_theta=10000), logits(without=["rope_theta"], rope_parameters=inside | {"rope_theta": 10000})
    assert others[0] == others[1] != logits()


def test_a_window_that_is_not_in_use_changes_no_bit():
    """In two layers, windows of four reach back six tokens; the last of ten sees the first."""
    window = dict(sliding_window=4, use_sliding_window=False, max_window_layers=70)
    assert logits(**window) == logits(without=["use_sliding_window", "sliding_window", "max_window_layers"])
    assert logits([5, *TEXT[1:]], **window) != logits(**window)


def test_llama_has_no_biases_and_the_same_layers():
    qwen2, llama = (ModelConfig.from_json(V4 | {"model_type": kind}) for kind in ("qwen2", "llama"))
    assert llama == replace(qwen2, qkv_bias=False) and not any(name.endswith(".bias") for name in llama.weight_shapes())
    assert {name: shape for name, shape in qwen2.weight_shapes().items() if not name.endswith(".bias")} == \
        llama.weight_shapes()
    assert llama.to_json()["model_type"] == "llama" and llama.to_json()["architectures"] == ["LlamaForCausalLM"]
    assert ModelConfig.from_json(llama.to_json()) == llama


def test_a_folder_without_a_usable_config(tmp_path):
    with pytest.raises(UserError, match="config.json: not found"):
        ModelConfig.from_folder(tmp_path)
    for text, words in (("[1]", "holds no JSON object"), ("{", "is not JSON"), ("", "is not JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=words):
            ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("loss, expected", [("rows", ("rows", 32)), ("rows:7", ("rows", 7)), ("vocab", ("vocab", 1024)),
                                            ("vocab:64", ("vocab", 64)), ("full", ("full", 0))])
def test_loss_tile(loss, expected):
    assert RunConfig(loss=loss).loss_tile() == expected


@pytest.mark.parametrize("loss", ["", "row", "rows:0", "rows:00", "rows:-1", "rows:x", "rows:²", "rows:7:7", "full:7"])
def test_loss_that_is_none(loss):
    with pytest.raises(UsageError, match="--loss"):
        RunConfig(loss=loss)


def test_rslora_divides_alpha_by_the_root_of_the_rank():
    """Scale 16/4 and 8/sqrt(4) are the same step to the bit; 8/4 is another."""
    assert RunConfig(rank=16, alpha=8.0).scale == 0.5 and RunConfig(rank=16, alpha=8.0, rslora=True).scale == 2.0
    config, found = small.model_config(), []
    for changes in (dict(alpha=16.0), dict(alpha=8.0, rslora=True), dict(alpha=8.0)):
        with small.engine(config, rank=4, **changes) as engine:
            batch = small.batch(config, 3, 13)
            found.append([np.array(engine.loss(batch)), *engine.gradients(batch).values()])
    plain, rslora, smaller = found
    assert all(a.tobytes() == b.tobytes() for a, b in zip(plain, rslora, strict=True))
    assert all((a != b).any() for a, b in zip(plain, smaller, strict=True))


def test_lists_of_names_are_the_same_run_as_tuples():
    run = RunConfig(targets=["q_proj"], keep=["x", "mid"], layers=[-1], betas=[0.9, 0.99])
    assert run == RunConfig(targets=("q_proj",), keep=("x", "mid"), layers=(-1,), betas=(0.9, 0.99)) and hash(run)
