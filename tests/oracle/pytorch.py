"""SmolLM2 with random adapters, in transformers + PEFT and here: logits, loss and every gradient.

PyTorch computes in float64 throughout, and so is right to the last figure; its float32 would not do as a reference.
Both sides read the checkpoint themselves.  What a checkpoint of SmolLM2 leaves open is drawn at random under its
name, so that nothing that could be left out is zero: the adapters, A and B, and Qwen2's biases.
"""

import zlib
from typing import NamedTuple

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from mesp_np.batch import Batch
from mesp_np.checkpoint import folder
from mesp_np.config import PROJECTIONS, RunConfig
from mesp_np.engine import Engine, plan_step
from mesp_np.generate import generator
from mesp_np.ops.cross_entropy import IGNORE
from tools.float64_torch import float64_throughout

RANK, ALPHA = 8, 16.0
LAST = 8
TEXTS = (
    "The tide tables were wrong that morning, and nobody in the harbour office could say why. By half past six the "
    "water stood a hand's breadth below the 1953 mark, although the moon, the wind and the barometer had all promised "
    "an ordinary ebb. Old Marta, who had kept the ledger for thirty-one years, put down her pencil. \"It isn't the "
    "sea,\" she said. \"Somebody has moved the post.\" And when they went out to look, there it was.",
    "To sort a list means to put its items in order. Start with two of them: if the first is larger, swap the pair, "
    "and go on until nothing moves.",
)


class Result(NamedTuple):
    """logits: an array (LAST, V) for each row, of its last tokens; loss: the mean; gradients: adapter name -> array."""

    logits: list
    loss: float
    gradients: dict


def drawn(name, shape):
    """float32 numbers that depend on the name alone."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (0.02 * rng.standard_normal(shape)).astype(np.float32)


def batch(path, length):
    """ids and labels (2, T) of the two texts, cut at `length` tokens: the second is shorter, and padded."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [tokenizer(text).input_ids[:length + 1] for text in TEXTS]
    ids, labels = np.zeros((2, len(rows[0]) - 1), int), np.full((2, len(rows[0]) - 1), IGNORE)
    for i, row in enumerate(rows):
        ids[i, :len(row) - 1], labels[i, :len(row) - 1] = row[:-1], row[1:]
    return ids, labels


# transformers + PEFT


@float64_throughout(modeling_qwen2)
@float64_throughout(modeling_llama)
def theirs(path, ids, labels, dense_weights=None):
    """Result of PyTorch's autograd.

    path           folder that transformers can read
    dense_weights  checkpoint name -> array to use instead of the folder's
    """
    model = load(path)
    fill(model, dense_weights)
    adapters = adapted(model)
    ids, labels = torch.from_numpy(ids), torch.from_numpy(labels)
    logits = model(input_ids=ids, attention_mask=(labels != IGNORE).long(), use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    gradients = torch.autograd.grad(loss, list(adapters.values()))
    assert all(t.dtype == torch.float64 for t in (logits, loss, *gradients))
    last = [row[label != IGNORE][-LAST:].detach().numpy() for row, label in zip(logits, labels, strict=True)]
    return Result(last, loss.item(), {name: g.numpy() for name, g in zip(adapters, gradients, strict=True)})


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


@torch.no_grad()
def fill(model, dense_weights):
    """Draw the biases, and put other weights into the place of the folder's if there are any."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.copy_(torch.from_numpy(drawn(name, parameter.shape)))
        elif dense_weights:
            parameter.copy_(torch.from_numpy(dense_weights[name]))


def adapted(model):
    """Give the model the adapters; returns {our name: parameter}."""
    get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS))).double()
    adapters = {name.removeprefix("model.").removesuffix(".default.weight"): parameter
                for name, parameter in model.named_parameters() if "lora_" in name}
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.copy_(torch.from_numpy(drawn(name, parameter.shape)))
    return adapters


@float64_throughout(modeling_qwen2)
@torch.no_grad()
def mean_loss(path, adapter, chats):
    """The mean loss of every token that an assistant says, by a model with an adapter or None."""
    tokenizer, model = AutoTokenizer.from_pretrained(path), load_adapted(path, adapter)
    return torch.cat([answer_losses(model, tokenizer, chat["messages"]) for chat in chats]).mean().item()


@float64_throughout(modeling_qwen2)
def said(path, adapter, given, tokens):
    """What the model says, greedily, after a text or in answer to messages."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = (tokenizer(given).input_ids if isinstance(given, str) else
           tokenizer.apply_chat_template(given, add_generation_prompt=True, return_dict=False))
    all_ids = load_adapted(path, adapter).generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(all_ids[0, len(ids):], skip_special_tokens=True)


def load_adapted(path, adapter):
    return PeftModel.from_pretrained(load(path), adapter).double() if adapter else load(path)


def answer_losses(model, tokenizer, messages):
    """The loss of each token of the assistant's turns, from behind its header to <|im_end|>."""
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    header = tokenizer("<|im_start|>assistant\n").input_ids
    end, learned = tokenizer.convert_tokens_to_ids("<|im_end|>"), []
    for i in range(len(header), len(ids)):
        if ids[i - len(header):i] == header:
            learned += range(i, ids.index(end, i) + 1)
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return cross_entropy(logits[[i - 1 for i in learned]], torch.tensor(ids)[learned], reduction="none")


def dequantised(path, dtype=np.float64):
    """Checkpoint name -> dense array of a quantised MLX folder, read with the safetensors library."""
    stored = load_file(path / "model.safetensors")
    modules = [name.removesuffix(".scales") for name in stored if name.endswith(".scales")]
    parts = {f"{module}.{part}" for module in modules for part in ("weight", "scales", "biases")}
    plain = {name: array for name, array in stored.items() if name not in parts}
    return plain | {f"{module}.weight": _dense(stored, module, dtype) for module in modules}


def _dense(stored, module, dtype):
    words, scales, biases = (stored[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
    bits = words.shape[1] // scales.shape[1]                # groups of 32: as many words as a code has bits
    codes = words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & (1 << bits) - 1
    groups = codes.reshape(*scales.shape, 32).astype(dtype)
    dense = groups * scales[..., None].astype(dtype) + biases[..., None].astype(dtype)
    return dense.reshape(len(words), -1)


# Here


def ours(path, ids, labels, dtype, perturb=lambda engine: None):
    """Result of this engine, which `perturb` may change before."""
    checkpoint = folder.load(path)
    biases = {name: drawn(name, shape) for name, shape in checkpoint.config.weight_shapes().items()
              if name.endswith(".bias")}
    run = RunConfig(batch_size=2, seq=ids.shape[1], rank=RANK, alpha=ALPHA, dtype=dtype, threads=2)
    weights = checkpoint.weights | biases
    plan = plan_step(checkpoint.config, run, weights=weights)
    with Engine(checkpoint.config, weights, run, plan.extent_bytes) as engine:
        for parameter in engine.parameters:
            parameter.value[:] = drawn(parameter.name, parameter.value.shape)
        perturb(engine)
        gradients = engine.gradients(Batch.of(ids, labels))
        logits = [_logits(engine, row[label != IGNORE]) for row, label in zip(ids, labels, strict=True)]
        return Result(logits, engine.loss(Batch.of(ids, labels)), gradients)


def _logits(engine, ids):
    """(LAST, V): a prompt of one row, then token by token through the key/value cache."""
    source, ids = generator(engine, len(ids)), ids.tolist()
    return np.array([source.logits(part) for part in (ids[:1 - LAST], *([token] for token in ids[1 - LAST:]))])


# Comparison


def differences(ours, theirs):
    """Name -> relative difference, of norms, of the loss, the logits of each row and each gradient."""
    assert set(ours.gradients) == set(theirs.gradients)
    pairs = {"loss": (ours.loss, theirs.loss)}
    pairs |= {f"logits {i}": pair for i, pair in enumerate(zip(ours.logits, theirs.logits, strict=True))}
    pairs |= {name: (gradient, theirs.gradients[name]) for name, gradient in ours.gradients.items()}
    return {name: np.linalg.norm(np.subtract(a, b)) / np.linalg.norm(b) for name, (a, b) in pairs.items()}
