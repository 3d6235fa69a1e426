"""Our codes are MLX's to the bit, and mlx-lm loads what we write and computes what we compute.

Skipped where mlx and mlx-lm are not installed.
"""

import numpy as np
import pytest

from mesp_np.checkpoint import folder
from mesp_np.ops.quant import BITS, GROUPS, Quantised, quantise, round_bf16, widen
from mesp_np.quantize import config_changes, quantised_tensors
from tests import quantised, small, tiny_tokenizer
from tests.ops.test_quant import awkward_rows

pytestmark = pytest.mark.oracle
mx = pytest.importorskip("mlx.core")
mlx_utils = pytest.importorskip("mlx_lm.utils")

STORES = {"float32": np.float32, "float16": np.float16, "bfloat16": round_bf16}
IDS = np.random.default_rng(0).integers(0, tiny_tokenizer.VOCAB_SIZE, (2, 7))


@pytest.fixture(autouse=True)
def on_the_processor():
    mx.set_default_device(mx.cpu)


def as_stored(array):
    """A NumPy array of an MLX one, bfloat16 as its bits."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", STORES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", GROUPS)
def test_codes_and_scales_are_those_of_mlx(seed, dtype, bits, group):
    rows = awkward_rows(np.random.default_rng(seed))
    if dtype == "float16":
        rows = rows[np.abs(rows).max(1) < 6e4]
    values = mx.array(rows).astype(getattr(mx, dtype))
    theirs = [as_stored(part) for part in mx.quantize(values, group_size=group, bits=bits)]
    codes, *others = quantise(np.array(values.astype(mx.float32)), bits, group)
    for ours, part in zip((codes, *map(STORES[dtype], others)), theirs):
        assert ours.dtype == part.dtype and np.array_equal(ours, part)


@pytest.mark.parametrize("dtype", STORES)
@pytest.mark.parametrize("bits", BITS)
def test_dense_weights_are_those_of_mlx_to_rounding(dtype, bits):
    """MLX rounds to the dtype of the scales, we keep float32."""
    values = mx.array(np.random.default_rng(1).standard_normal((16, 256))).astype(getattr(mx, dtype))
    parts = mx.quantize(values, group_size=64, bits=bits)
    theirs = np.array(mx.dequantize(*parts, group_size=64, bits=bits).astype(mx.float32))
    ours = np.empty_like(theirs)
    widen(ours, Quantised(*map(as_stored, parts), bits))
    unit = {"float32": 2.0 ** -22, "float16": 2.0 ** -9, "bfloat16": 2.0 ** -6}[dtype]
    assert np.abs(ours - theirs).max() <= unit * np.abs(ours).max()


def our_log_probabilities(path):
    checkpoint, run = folder.load(path), small.run_config(trainable="none")
    with small.Engine(checkpoint.config, checkpoint.weights, run, 1 << 24) as engine:
        return small.log_probabilities(engine, IDS)


def their_log_probabilities(path):
    model, _ = mlx_utils.load_model(path)
    logits = model(mx.array(IDS)).astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("qkv_bias", [True, False], ids=["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("bits", [4, 8])
def test_mlx_lm_loads_what_we_write_and_has_our_logits(tmp_path, qkv_bias, tied, bits):
    config = quantised.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, tie_word_embeddings=tied, qkv_bias=qkv_bias)
    weights = small.weights(config)
    plain, path = tmp_path / "plain", tmp_path / "model"
    folder.save(plain, config, weights, tiny_tokenizer.write(tmp_path / "tokenizer"), "f32")
    folder.derive(path, plain, quantised_tensors(folder.load(plain).weights, bits, 32), config_changes(bits, 32))
    ours, theirs = our_log_probabilities(path), their_log_probabilities(path)
    assert np.abs(ours - theirs).max() < 2e-4
    assert np.abs(ours - our_log_probabilities(plain)).max() > 2e-3          # codes are not what was quantised


def test_mlx_lm_takes_overrides_and_plain_modules_as_we_do(tmp_path):
    config = quantised.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE)
    plain, path, embed, up = tmp_path / "plain", tmp_path / "model", "model.embed_tokens", "model.layers.1.mlp.up_proj"
    weights = small.weights(config)
    folder.save(plain, config, weights, tiny_tokenizer.write(tmp_path / "tokenizer"), "f32")
    stored = quantised.weights(config, "f32")
    stored |= {embed + ".weight": quantised.stored(weights[embed + ".weight"], 8, 32, "f32"),
               up + ".weight": weights[up + ".weight"]}
    block = {"bits": 4, "group_size": 32, embed: {"bits": 8, "group_size": 32}}
    folder.derive(path, plain, stored, {"quantization": block})
    assert np.abs(our_log_probabilities(path) - their_log_probabilities(path)).max() < 2e-4
