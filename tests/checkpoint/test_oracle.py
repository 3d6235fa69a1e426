"""What we write is what transformers and PEFT read, and they compute what we compute.

Skipped where torch, transformers and peft are not installed.
"""

import numpy as np
import pytest

from mesp_np.checkpoint import adapter, folder
from mesp_np.checkpoint.adapter_config import read_config
from mesp_np.cli import main
from mesp_np.ops.quant import round_bf16
from tests import small, tiny_tokenizer

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IDS = np.random.default_rng(0).integers(0, tiny_tokenizer.VOCAB_SIZE, (2, 7))
TOLERANCE = 2e-5  # transformers rounds to float32 inside RMSNorm, softmax and RoPE, in float64 models too
SETTINGS = [dict(alpha=8.0), dict(alpha=3.5, rslora=True, targets=("o_proj", "down_proj", "k_proj")),
            dict(alpha=8.0, layers=(1,), dropout=0.3)]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def config(request):
    return small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, tie_word_embeddings=request.param)


def save_model(path, config, dtype="f32"):
    """A random model's folder, and its weights."""
    weights = small.weights(config)
    folder.save(path, config, weights, tiny_tokenizer.write(path.parent / "tokenizer"), dtype)
    return weights


def engine_on(path, run):
    checkpoint = folder.load(path)
    plan = small.plan_step(checkpoint.config, run, weights=checkpoint.weights)
    return small.Engine(checkpoint.config, checkpoint.weights, run, plan.extent_bytes)


def our_log_probabilities(engine):
    return small.log_probabilities(engine, IDS)


def their_log_probabilities(model):
    with torch.no_grad():
        return model.double()(torch.from_numpy(IDS)).logits.log_softmax(-1).numpy()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_saved_folder_loads_in_transformers(tmp_path, config, dtype):
    weights = save_model(tmp_path / "model", config, dtype)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()) and model.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert model.config.rope_parameters["rope_theta"] == config.rope_theta
    for name, tensor in model.named_parameters():
        if dtype == "bf16":
            assert np.array_equal(tensor.detach().view(torch.int16).numpy().view(np.uint16), round_bf16(weights[name]))
        else:
            assert np.array_equal(tensor.detach().numpy(), weights[name])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == tiny_tokenizer.EOS


@pytest.mark.parametrize("settings", SETTINGS)
def test_saved_adapter_gives_our_logits_in_peft(tmp_path, config, settings):
    save_model(tmp_path / "model", config)
    with engine_on(tmp_path / "model", small.run_config(dtype="float64", **settings)) as engine:
        rng = np.random.default_rng(1)
        for p in engine.parameters:
            p.value[:] = (0.2 * rng.standard_normal(p.value.shape)).astype(np.float32)
        adapter.save(tmp_path / "adapter", engine.parameters, engine.run, tmp_path / "model")
        ours = our_log_probabilities(engine)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    without = their_log_probabilities(base)
    theirs = their_log_probabilities(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert np.abs(ours - theirs).max() < TOLERANCE and np.abs(ours - without).max() > 0.1


@pytest.mark.parametrize("settings", SETTINGS)
def test_adapter_of_peft_gives_its_logits_here(tmp_path, config, settings):
    save_model(tmp_path / "model", config)
    run = small.run_config(dtype="float64", **settings)
    model = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        peft.LoraConfig(r=run.rank, lora_alpha=run.alpha, use_rslora=run.rslora, target_modules=list(run.targets),
                        lora_dropout=run.dropout, layers_to_transform=list(run.layers) or None,
                        init_lora_weights=False, task_type="CAUSAL_LM")).eval()
    model.save_pretrained(tmp_path / "adapter")
    found = read_config(tmp_path / "adapter")
    assert (found.rank, found.layers, found.dropout) == (run.rank, run.layers, run.dropout)
    with engine_on(tmp_path / "model", run) as engine:
        adapter.load(tmp_path / "adapter", engine.parameters, run)
        assert np.abs(our_log_probabilities(engine) - their_log_probabilities(model)).max() < TOLERANCE


@pytest.mark.parametrize("settings", SETTINGS)
def test_merged_folder_gives_the_logits_of_base_and_adapter(tmp_path, config, settings):
    """In float32: 1e-5 from PEFT on the base, and far from the base alone."""
    save_model(tmp_path / "model", config)
    with small.engine(config, **settings) as engine:
        adapter.save(tmp_path / "adapter", engine.parameters, engine.run, tmp_path / "model")
    assert main(["merge", "--model", str(tmp_path / "model"), "--adapter", str(tmp_path / "adapter"),
                 "--out", str(tmp_path / "merged")]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    without = their_log_probabilities(base)
    adapted = their_log_probabilities(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
    merged, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(report.values())
    assert np.abs(their_log_probabilities(merged) - adapted).max() < 1e-5 < 0.1 < np.abs(adapted - without).max()
