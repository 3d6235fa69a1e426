"""Adapters in PEFT's format: there and back, byte for byte, and every reason to refuse one."""

import json
import os

import numpy as np
import pytest

from mesp_np.checkpoint import adapter, safetensors_file
from mesp_np.config import PROJECTIONS, RunConfig
from mesp_np.errors import UserError
from mesp_np.ops.quant import BF16, round_bf16, widen
from mesp_np.params import Parameter

RUN = RunConfig(rank=4, alpha=8.0, targets=("v_proj", "q_proj"))
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def parameters(run=RUN, layers=2, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"lora_A": (run.rank, 16), "lora_B": (24, run.rank)}
    return [Parameter(f"layers.{layer}.self_attn.{target}.{side}",
                      rng.standard_normal(shape).astype(np.float32), trainable=True)
            for layer in range(layers) for target in sorted(run.targets) for side, shape in shapes.items()]


def values(parameters):
    return np.concatenate([p.value.ravel() for p in parameters])


@pytest.fixture
def folder(tmp_path):
    adapter.save(tmp_path / "adapter", parameters(), RUN, "Qwen/Qwen2.5-0.5B")
    return tmp_path / "adapter"


def set_config(folder, **changes):
    path = folder / adapter.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_tensors(folder, change, dtype=np.float32):
    tensors = dict(safetensors_file.read(folder / adapter.WEIGHTS))
    change(tensors)
    safetensors_file.write(folder / adapter.WEIGHTS, tensors, dtype)


def refusal(folder, run=RUN):
    """The message that loading ends with; the parameters must be untouched."""
    target = parameters(seed=1)
    with pytest.raises(UserError) as raised:
        adapter.load(folder, target, run)
    assert np.array_equal(values(target), values(parameters(seed=1)))
    return str(raised.value)


def test_there_and_back(folder):
    target = parameters(seed=1)
    adapter.load(folder, target, RUN)
    assert np.array_equal(values(target), values(parameters()))
    config = adapter.read_config(folder)
    assert config == adapter.AdapterConfig(4, 8.0, ("q_proj", "v_proj"), False, "Qwen/Qwen2.5-0.5B")


def test_what_is_written(folder):
    text = (folder / adapter.CONFIG).read_text()
    raw = json.loads(text)
    assert text == json.dumps(raw, indent=2, sort_keys=True) + "\n"
    assert raw["lora_alpha"] == 8 and raw["target_modules"] == ["q_proj", "v_proj"] and raw["inference_mode"] is True
    entries = safetensors_file.read_header(folder / adapter.WEIGHTS)
    assert len(entries) == 8 and all(entry.dtype == np.float32 for entry in entries.values())
    assert entries[PREFIX + ".lora_A.weight"].shape == (4, 16)
    assert entries[PREFIX + ".lora_B.weight"].shape == (24, 4)


def test_same_adapter_same_bytes(folder, tmp_path):
    adapter.save(tmp_path / "again", reversed(parameters()), RUN, "Qwen/Qwen2.5-0.5B")
    for name in os.listdir(folder):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_views_are_written_right(tmp_path):
    """Adapters that are transposed or strided views of a larger array, as of an arena."""
    made = parameters()
    for p in made:
        wide = np.zeros((p.value.shape[1] * 2, p.value.shape[0]), np.float32)
        wide[::2] = p.value.T
        p.value = wide[::2].T
    adapter.save(tmp_path / "adapter", made, RUN, "base")
    target = parameters(seed=1)
    adapter.load(tmp_path / "adapter", target, RUN)
    assert np.array_equal(values(target), values(made))


def test_saving_over_the_folder_that_was_loaded(folder):
    mapped = safetensors_file.read(folder / adapter.WEIGHTS)
    adapter.save(folder, parameters(seed=2), RUN, "base")
    assert np.array_equal(mapped[PREFIX + ".lora_A.weight"], parameters()[0].value)
    target = parameters()
    adapter.load(folder, target, RUN)
    assert np.array_equal(values(target), values(parameters(seed=2)))


def test_other_stored_forms(folder):
    set_tensors(folder, lambda tensors: None, BF16)
    target = parameters(seed=1)
    adapter.load(folder, target, RUN)
    expected = np.empty((1, values(target).size), np.float32)
    widen(expected, round_bf16(values(parameters()))[np.newaxis])
    assert np.array_equal(values(target), expected[0])


def test_float16_and_a_float64_run(tmp_path, folder):
    import safetensors.numpy
    halves = {name: array.astype(np.float16) for name, array in safetensors_file.read(folder / adapter.WEIGHTS).items()}
    safetensors.numpy.save_file(halves, folder / adapter.WEIGHTS)
    target = parameters(seed=1)
    for p in target:
        p.value = p.value.astype(np.float64)
    adapter.load(folder, target, RUN)
    assert np.array_equal(values(target), values(parameters()).astype(np.float16))


def test_wrong_names_are_told_together(folder):
    def change(tensors):
        tensors[PREFIX + ".lora_A.default.weight"] = tensors.pop(PREFIX + ".lora_A.weight")
        tensors[PREFIX.replace("0", "2") + ".lora_A.weight"] = np.zeros((4, 16), np.float32)
        tensors[PREFIX + ".lora_B.weight"] = np.zeros((5, 4), np.float32)
        del tensors[PREFIX.replace("0", "1") + ".lora_B.weight"]
    set_tensors(folder, change)
    message = refusal(folder)
    for words in ("5 problems", ".0.self_attn.q_proj.lora_A.weight is missing", "lora_A.default.weight is unexpected",
                  "layers.2.self_attn.q_proj.lora_A.weight is unexpected", "has shape (5, 4), expected (24, 4)",
                  "layers.1.self_attn.q_proj.lora_B.weight is missing"):
        assert words in message, message


def test_one_model_prefix_too_few(folder):
    set_tensors(folder, lambda tensors: [tensors.update({name.replace("model.model.model", "model.model"):
                                                         tensors.pop(name)}) for name in list(tensors)])
    assert "16 problems" in refusal(folder)


def test_settings_that_differ_from_the_run(folder):
    run = RunConfig(rank=2, alpha=16.0, rslora=True, targets=PROJECTIONS)
    message = refusal(folder, run)
    for words in ("rank is 4, the run has 2", "alpha is 8.0, the run has 16.0", "rslora is False, the run has True",
                  "targets is ['q_proj', 'v_proj'], the run has"):
        assert words in message


@pytest.mark.parametrize("changes", [
    {"bias": "all"}, {"fan_in_fan_out": True}, {"use_dora": True}, {"lora_bias": True},
    {"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 2}},
    {"layers_to_transform": [0]},
    {"exclude_modules": ["x"]}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"},
    {"trainable_token_indices": [1]}, {"some_later_invention": True}, {"target_modules": ["embed_tokens", "q_proj"]},
    {"target_modules": ".*q_proj"}, {"target_modules": None}, {"target_modules": []}, {"r": 0}, {"r": True},
    {"lora_alpha": None}, {"lora_alpha": -1}])
def test_refused_settings_are_named(folder, changes):
    set_config(folder, **changes)
    key, value = next(iter(changes.items()))
    assert f"{key} is {value!r}" in refusal(folder)


def test_harmless_settings_are_accepted(folder):
    set_config(folder, peft_version="0.21.2", megatron_core="megatron.core", qalora_group_size=16, loftq_config={},
               lora_dropout=0.05, init_lora_weights="gaussian", revision="main", task_type=None, use_bdlora=None)
    adapter.load(folder, parameters(), RUN)


def test_all_linear_and_rslora(folder):
    set_config(folder, target_modules="all-linear", use_rslora=True)
    config = adapter.read_config(folder)
    assert config.targets == PROJECTIONS and config.rslora


def test_folders_that_are_no_adapters(folder, tmp_path):
    with pytest.raises(UserError, match="adapter_config.json: cannot be read"):
        adapter.read_config(tmp_path)
    (folder / adapter.WEIGHTS).unlink()
    assert "adapter_model.safetensors: cannot be read" in refusal(folder)
    set_config(folder, peft_type="IA3")
    with pytest.raises(UserError, match="peft_type is 'IA3'"):
        adapter.read_config(folder)
    (folder / adapter.CONFIG).write_text('{"fine_tune_type": "lora", "num_layers": 16}')
    with pytest.raises(UserError, match="an mlx-lm adapter"):
        adapter.read_config(folder)
