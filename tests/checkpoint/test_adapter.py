"""Adapters in PEFT's format: there and back, byte for byte, and every reason to refuse one."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from mesp_np.checkpoint import adapter, safetensors_file
from mesp_np.checkpoint.adapter_config import CONFIG, PEFT_WEIGHTS, AdapterConfig, read_config
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
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def set_tensors(folder, change, dtype=np.float32):
    tensors = dict(safetensors_file.read(folder / PEFT_WEIGHTS))
    change(tensors)
    safetensors_file.write(folder / PEFT_WEIGHTS, tensors, dtype)


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
    config = read_config(folder)
    assert config == AdapterConfig(4, 8.0, ("q_proj", "v_proj"), base_name="Qwen/Qwen2.5-0.5B")


def test_what_is_written(folder):
    text = (folder / CONFIG).read_text()
    raw = json.loads(text)
    assert text == json.dumps(raw, indent=2, sort_keys=True) + "\n"
    assert raw["lora_alpha"] == 8 and raw["target_modules"] == ["q_proj", "v_proj"] and raw["inference_mode"] is True
    entries = safetensors_file.read_header(folder / PEFT_WEIGHTS)
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
    mapped = safetensors_file.read(folder / PEFT_WEIGHTS)
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
    halves = {name: array.astype(np.float16) for name, array in safetensors_file.read(folder / PEFT_WEIGHTS).items()}
    safetensors.numpy.save_file(halves, folder / PEFT_WEIGHTS)
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
    {"layers_to_transform": [-1]}, {"layers_to_transform": "0"}, {"layers_pattern": "blocks"}, {"lora_dropout": 1.0},
    {"exclude_modules": ["x"]}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"},
    {"trainable_token_indices": [1]}, {"some_later_invention": True}, {"target_modules": ["embed_tokens", "q_proj"]},
    {"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["embed_tokens"]},
    {"target_modules": ".*q_proj"}, {"target_modules": None}, {"target_modules": []}, {"r": 0}, {"r": True},
    {"r": 10 ** 30}, {"lora_alpha": None}, {"lora_alpha": -1}, {"lora_alpha": 1e300}, {"use_rslora": "false"},
    {"use_rslora": 1}])
def test_refused_settings_are_named(folder, changes):
    set_config(folder, **changes)
    key, value = next(iter(changes.items()))
    assert f"{key} is {'not there' if value is None else repr(value)}" in refusal(folder)


def test_harmless_settings_are_accepted(folder):
    set_config(folder, peft_version="0.21.2", megatron_core="megatron.core", qalora_group_size=16, loftq_config={},
               lora_dropout=0.05, init_lora_weights="gaussian", revision="main", task_type=None, use_bdlora=None)
    adapter.load(folder, parameters(), RUN)


def test_all_linear_and_rslora(folder):
    set_config(folder, target_modules="all-linear", use_rslora=True)
    config = read_config(folder)
    assert config.targets == PROJECTIONS and config.rslora


def test_dropout_is_saved_and_read(tmp_path):
    adapter.save(tmp_path / "adapter", parameters(), replace(RUN, dropout=0.25), "base")
    assert read_config(tmp_path / "adapter").dropout == 0.25
    target = parameters(seed=1)
    adapter.load(tmp_path / "adapter", target, replace(RUN, dropout=0.5))        # the run's own dropout is its business
    assert np.array_equal(values(target), values(parameters()))


def test_layers_are_saved_and_read(tmp_path):
    """Null when all have adapters; else their indices from the front, however the run names them."""
    adapter.save(tmp_path / "all", parameters(), RUN, "base")
    assert json.loads((tmp_path / "all" / CONFIG).read_text())["layers_to_transform"] is None
    run = replace(RUN, layers=(-1,))
    some = [p for p in parameters() if p.name.startswith("layers.1.")]
    adapter.save(tmp_path / "some", some, run, "base")
    assert json.loads((tmp_path / "some" / CONFIG).read_text())["layers_to_transform"] == [1]
    assert read_config(tmp_path / "some").layers == (1,)
    target = [p for p in parameters(seed=1) if p.name.startswith("layers.1.")]
    adapter.load(tmp_path / "some", target, run)
    assert np.array_equal(values(target), values(some))
    assert "layers.0.self_attn.q_proj.lora_A.weight is missing" in refusal(tmp_path / "some")


def test_one_layer_may_be_a_number(folder):
    set_config(folder, layers_to_transform=1, layers_pattern="layers")
    assert read_config(folder).layers == (1,)


def test_an_a_without_its_b(folder):
    set_tensors(folder, lambda tensors: tensors.pop(PREFIX + ".lora_B.weight"))
    assert PREFIX + ".lora_B.weight is missing" in refusal(folder)


def test_biases_of_an_adapter_are_not_ignored(folder):
    set_tensors(folder, lambda tensors: tensors.update({PREFIX + ".lora_B.bias": np.zeros(24, np.float32)}))
    assert PREFIX + ".lora_B.bias is unexpected" in refusal(folder)


@pytest.mark.parametrize("name, same", [
    ("Qwen/Qwen2.5-0.5B", True), ("/models/Qwen2.5-0.5B", True), ("models/Qwen2.5-0.5B/", True), (None, True),
    ("/cache/models--Qwen--Qwen2.5-0.5B/snapshots/0123abc", True), ("Qwen/Qwen2.5-0.5B-Instruct", False)])
def test_another_base_is_a_warning(name, same):
    config = AdapterConfig(4, 8.0, ("q_proj",), base_name=name)
    for model in ("Qwen/Qwen2.5-0.5B", "/home/me/Qwen2.5-0.5B"):
        warning = config.other_base(model)
        assert (warning == "") == same and (same or name in warning)


def test_targets_may_have_their_part_before_them(folder):
    set_config(folder, target_modules=["self_attn.v_proj", "q_proj"])
    assert read_config(folder).targets == ("q_proj", "v_proj")


def test_folders_that_are_no_adapters(folder, tmp_path):
    with pytest.raises(UserError, match="adapter_config.json: cannot be read"):
        read_config(tmp_path / "none")
    with pytest.raises(UserError, match="is a file"):
        read_config(folder / CONFIG)
    (folder / PEFT_WEIGHTS).unlink()
    assert "adapter_model.safetensors: cannot be read" in refusal(folder)
    (folder / "adapter_model.bin").write_bytes(b"PK")
    assert "has adapter_model.bin, a PyTorch file" in refusal(folder)
    with pytest.raises(UserError, match="name the folder inside it: .*adapter"):
        read_config(tmp_path)
    set_config(folder, peft_type="IA3")
    with pytest.raises(UserError, match="peft_type is 'IA3'"):
        read_config(folder)


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_adapters_of_the_head_or_the_embedding_are_not_ignored(folder, module):
    """Not even where the settings do not speak of them."""
    names = [f"base_model.model.{module}.{side}" for side in ("lora_A.weight", "lora_embedding_A", "weight")]
    set_tensors(folder, lambda tensors: tensors.update(dict.fromkeys(names, np.zeros((4, 16), np.float32))))
    message = refusal(folder)
    assert all(f"{name} is unexpected" in message for name in names)
