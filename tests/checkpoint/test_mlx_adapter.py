"""Adapters of mlx-lm: the other way round, scaled otherwise, and refused when anything is odd."""

import json

import numpy as np
import pytest

from mesp_np.checkpoint import adapter, folder, safetensors_file
from mesp_np.checkpoint.adapter_config import CONFIG, MLX_WEIGHTS, AdapterConfig, read_config
from mesp_np.config import PROJECTIONS, module_name
from mesp_np.errors import UserError
from tests import small, tiny_tokenizer

SETTINGS = dict(rank=8, alpha=160.0, batch_size=1, dtype="float64")
SQUARE = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=2, head_dim=4)


def write(path, parameters, turn=True, **config):
    """The mlx-lm adapter with the values of `parameters`; not turned, its matrices lie as PEFT's do."""
    path.mkdir(exist_ok=True)
    tensors = {}
    for p in parameters:
        module, _, side = p.name.rpartition(".lora_")
        tensors[f"model.{module}.lora_{side.lower()}"] = p.value.T if turn else p.value
    safetensors_file.write(path / MLX_WEIGHTS, tensors, np.float32)
    keys = sorted({module_name(p.name.split(".")[3]) for p in parameters})
    raw = {"fine_tune_type": "lora", "num_layers": -1, "model": "mlx-community/base", "iters": 1000,
           "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": keys}}
    (path / CONFIG).write_text(json.dumps(raw | config))
    return path


def loss(engine):
    return engine.loss(small.batch(engine.config, 1, 13))


def rounded(engine):
    """The engine, its adapters rounded to what a file holds."""
    for p in engine.parameters:
        p.value[:] = p.value.astype(np.float32)
    return engine


def test_peft_and_mlx_agree_where_every_matrix_is_square(tmp_path):
    """8 x 8 everywhere: shapes cannot tell A from its transpose, so a wrong turn would pass every check but this."""
    config = small.model_config(**SQUARE)
    with rounded(small.engine(config, **SETTINGS)) as engine, small.engine(config, **SETTINGS) as other:
        expected = loss(engine)
        adapter.save(tmp_path / "peft", engine.parameters, engine.run, "base")
        adapter.load(tmp_path / "peft", other.parameters, other.run)
        assert loss(other) == expected
        adapter.load(write(tmp_path / "mlx", engine.parameters), other.parameters, other.run)
        assert loss(other) == expected
        adapter.load(write(tmp_path / "not-turned", engine.parameters, turn=False), other.parameters, other.run)
        assert abs(loss(other) - expected) > 1e-3


def test_settings(tmp_path):
    with small.engine(**SETTINGS) as engine:
        path = write(tmp_path / "mlx", engine.parameters,
                     lora_parameters={"rank": 8, "scale": 2.5, "dropout": 0.1, "keys": ["self_attn.q_proj"]})
    assert read_config(path) == AdapterConfig(8, 20.0, ("q_proj",), dropout=0.1, base_name="mlx-community/base",
                                              dialect="mlx")


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_other_stored_forms(tmp_path, dtype):
    with rounded(small.engine(**SETTINGS)) as engine:
        path = write(tmp_path / "mlx", engine.parameters)
        tensors = dict(safetensors_file.read(path / MLX_WEIGHTS))
        safetensors_file.write(path / MLX_WEIGHTS, tensors, safetensors_file.DTYPES[dtype])
        expected = [p.value.copy() for p in engine.parameters]
        adapter.load(path, engine.parameters, engine.run)
        for p, value in zip(engine.parameters, expected, strict=True):
            np.testing.assert_allclose(p.value, value, rtol=2 ** -8)


def test_without_keys_the_tensors_tell_the_targets(tmp_path):
    """mlx-lm then adapts every linear layer; num_layers 16 in a model of two means both."""
    parameters = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    with small.engine(**SETTINGS) as engine:
        path = write(tmp_path / "mlx", engine.parameters, lora_parameters=parameters, num_layers=16)
        config = read_config(path)
        assert config.targets == PROJECTIONS and config.layers == ()
        adapter.load(path, engine.parameters, engine.run)


def test_the_last_layers(tmp_path):
    with small.engine(layers=(-1,), **SETTINGS) as engine:
        path = write(tmp_path / "mlx", engine.parameters, num_layers=1)
        assert read_config(path).layers == (1,)
        adapter.load(path, engine.parameters, engine.run)


def test_a_missing_layer_is_told(tmp_path):
    with small.engine(**SETTINGS) as engine:
        for layer, found in ((0, "layers.0.self_attn.q_proj.lora_a is missing"),
                             (1, "layers.1.self_attn.q_proj.lora_a is missing")):
            kept = [p for p in engine.parameters if not p.name.startswith(f"layers.{layer}.")]
            path = write(tmp_path / f"without-{layer}", kept, num_layers=2)
            with pytest.raises(UserError, match=found):
                adapter.load(path, engine.parameters, engine.run)


def test_names_that_match_nothing_are_told(tmp_path):
    with small.engine(**SETTINGS) as engine:
        path = write(tmp_path / "mlx", engine.parameters)
        tensors = dict(safetensors_file.read(path / MLX_WEIGHTS))
        tensors["model.layers.7.mlp.up_proj.lora_a"] = tensors.pop("model.layers.1.mlp.up_proj.lora_a")
        safetensors_file.write(path / MLX_WEIGHTS, tensors, np.float32)
        with pytest.raises(UserError) as raised:
            adapter.load(path, engine.parameters, engine.run)
    assert "layers.1.mlp.up_proj.lora_a is missing" in str(raised.value)
    assert "layers.7.mlp.up_proj.lora_a is unexpected" in str(raised.value)


@pytest.mark.parametrize("changes, words", [
    ({"fine_tune_type": "dora"}, "fine_tune_type is 'dora'"), ({"fine_tune_type": "full"}, "fine_tune_type is 'full'"),
    ({"lora_parameters": None}, "has no lora_parameters"), ({"num_layers": None}, "num_layers is not there"),
    ({"lora_parameters": {"rank": 0, "scale": 1.0}}, "rank is 0"),
    ({"lora_parameters": {"rank": 10 ** 30, "scale": 1.0}}, "rank is 1000"),
    ({"lora_parameters": {"rank": 8, "scale": 5e37}}, "scale * rank is 4e+38"),
    ({"lora_parameters": {"rank": 8, "alpha": 16}}, "scale is not there"),
    ({"lora_parameters": {"rank": 8, "scale": 1, "dropout": 1}}, "dropout is 1"),
    ({"lora_parameters": {"rank": 8, "scale": 1, "keys": ["self_attn.qkv_proj"]}}, "keys is"),
    ({"lora_parameters": {"rank": 8, "scale": 1, "keys": []}}, "keys is")])
def test_refused_settings_are_named(tmp_path, changes, words):
    with small.engine(**SETTINGS) as engine:
        path = write(tmp_path / "mlx", engine.parameters, **changes)
    with pytest.raises(UserError, match="adapter_config.json") as raised:
        read_config(path)
    assert words in str(raised.value)


def test_a_folder_without_its_tensors(tmp_path):
    (tmp_path / CONFIG).write_text('{"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}}')
    (tmp_path / "0000100_adapters.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="adapters.safetensors: cannot be read"):
        read_config(tmp_path)


@pytest.mark.oracle
def test_mlx_computes_what_we_compute(tmp_path):
    """mlx-lm's own adapter on its own model, against ours: the mean loss of the same tokens."""
    mx, nn = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.nn")
    tuner, utils = pytest.importorskip("mlx_lm.tuner.utils"), pytest.importorskip("mlx_lm.utils")
    config = small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE)
    folder.save(tmp_path / "model", config, small.weights(config), tiny_tokenizer.write(tmp_path / "tokenizer"), "f32")
    batch = small.batch(config, 1, 13, ignored=0)

    def their_loss(model):
        return nn.losses.cross_entropy(model(mx.array(batch.ids)), mx.array(batch.labels), reduction="mean").item()

    model, _ = utils.load_model(tmp_path / "model")
    with small.engine(config, rank=8, alpha=4.0, batch_size=1) as engine:
        path = write(tmp_path / "mlx", engine.parameters, num_layers=16,
                     lora_parameters={"rank": 8, "scale": 0.5, "dropout": 0.0})
        adapter.load(path, engine.parameters, engine.run)
        ours, without = engine.loss(batch), their_loss(model)
    tuner.load_adapters(model, path)
    assert abs(their_loss(model) - ours) < 1e-5 < 0.1 < abs(without - ours)


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens", "embed_tokens"])
def test_adapters_of_the_head_or_the_embedding_are_refused_by_name(tmp_path, module):
    with small.engine(**SETTINGS) as engine:
        settings = {"rank": 8, "scale": 20.0, "dropout": 0.0, "keys": ["self_attn.q_proj", module]}
        path = write(tmp_path / "mlx", engine.parameters, lora_parameters=settings)
    with pytest.raises(UserError, match=f"keys is .*{module}"):
        read_config(path)
