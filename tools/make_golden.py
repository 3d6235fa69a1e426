#!/usr/bin/env python3
"""Make the golden files of tests/golden: what PyTorch computes for two tiny Qwen2 models.

    python3 -m venv oracle
    oracle/bin/pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy
    oracle/bin/python tools/make_golden.py [--out tests/golden] [--seed 0]

The versions above are checked at the start and recorded in each file (key `made_by`, JSON); NumPy's is
only recorded. Everything runs on one CPU thread, so a second run gives equal arrays. Takes a few seconds.

lora_tied.npz, lora_untied.npz    transformers + PEFT LoRA on all seven projections, B not zero
    config, made_by               JSON strings; config has the keys of a checkpoint's config.json
    ids, labels                   (B, T); labels[b, t] is the target of row t, -100 is no target
    weight/<checkpoint name>      base weights (tied: there is no lm_head.weight)
    lora/<name>, grad/<name>      adapters and their gradients, for instance layers.0.self_attn.q_proj.lora_A (R, in)
                                  and layers.0.self_attn.q_proj.lora_B (out, R)
    rank, alpha, logits, loss     logits (B, T, V); loss is the mean cross-entropy over the rows with a target
    losses_sgd, losses_adamw      (10,) loss before each update, afresh from the values above; settings in OPTIMIZERS

full_tied.npz, full_untied.npz    the same models without LoRA, every parameter trainable
    config, made_by, ids, labels, logits, loss, and grad/<checkpoint name> of every weight. The weights are
    NOT stored again: they are the weight/ arrays of the lora file beside it, which is asserted here.

saved_tensors.json                what autograd keeps for one decoder layer in float32, with eager and with sdpa
    attention: one row per saved non-parameter tensor, in order. Equal `storage` is the same memory, counted
    once in `bytes`. `name` is the block's name for it, found by comparing values with a forward pass by hand;
    `expanded` says that the K heads of k or v were repeated to H. sdpa adds the name lse: each row's log-sum-exp.

Two choices make these files fit for tight tolerances:
- transformers rounds to float32 inside RMSNorm, softmax and RoPE whatever the model's dtype. Here its modelling
  file sees a `torch` whose float32 is float64 (float64_torch.py), so that every number is float64 all through.
- Weights and adapters are exactly representable in bfloat16, so a run in any dtype starts from the same numbers.
Each gradient tensor is also checked against a central difference at one random element.
"""
import argparse
import json
import pathlib
import re
from importlib.metadata import version

import numpy as np
import torch
from float64_torch import float64_throughout
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from pinned import PYTORCH
from torch.nn.functional import cross_entropy, silu
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2 import modeling_qwen2

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "vocab_size": 67,
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40,
    "num_hidden_layers": 2, "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "attention_dropout": 0.0, "use_sliding_window": False,
}
B, T, RANK, ALPHA, STEPS = 2, 9, 4, 8, 10
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01),
}
LAYER = {"B": 1, "T": 64, "D": 96, "F": 200, "H": 6, "K": 2, "E": 16, "R": 8}  # sizes of saved_tensors.json


def check_versions():
    """Refuse other versions than the pinned ones; return what to record."""
    found = {package: version(package) for package in [*PYTORCH, "numpy"]}
    for package, wanted in PYTORCH.items():
        if found[package].split("+")[0] != wanted:
            raise SystemExit(f"{package} is {found[package]}, not {wanted}\n"
                             f"HINT: pip install {' '.join(f'{p}=={v}' for p, v in PYTORCH.items())}")
    return found


# The two models


def draw(rng, name, shape):
    """Random values for the parameter `name`, each exactly a bfloat16 number; none is trivial (0 or 1)."""
    noise = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        values = 1 + 0.2 * noise
    else:
        values = (0.1 if "lora_" in name else 0.3) * noise
    return torch.from_numpy(values).bfloat16().double()


def adapter_name(name):
    """base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight -> layers.0.mlp.up_proj.lora_A"""
    return name.removeprefix("base_model.model.model.").removesuffix(".default.weight")


def fill(model, rng, part):
    """Overwrite with random values the parameters whose name contains `part`; return them as {name: parameter}."""
    params = {adapter_name(name): p for name, p in model.named_parameters() if part in name}
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(draw(rng, name, p.shape))
    return params


def make_batch(seed):
    """ids and labels (B, T): the next token, with three rows ignored. Tokens repeat; 0 and V-1 both occur."""
    tokens = np.random.default_rng(seed).integers(1, CONFIG["vocab_size"], (B, T + 1))
    tokens[0, 4], tokens[1, 2], tokens[1, 7] = 0, CONFIG["vocab_size"] - 1, tokens[0, 1]
    ids, labels = torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())
    labels[0, 5] = labels[1, 3] = labels[1, 4] = -100
    return ids, labels


def forward(model, ids, labels):
    """logits (B, T, V), and the loss over the labels as they are: nothing is shifted."""
    logits = model(input_ids=ids, use_cache=False).logits
    return logits, cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def gradients(model, params, batch):
    """One backward pass: logits, loss and {grad/name: gradient}, checked by finite differences."""
    logits, loss = forward(model, *batch)
    grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
    assert all(t.dtype == torch.float64 for t in (logits, loss, *grads.values()))
    check_by_differences(model, params, grads, batch)
    return {"logits": logits, "loss": loss} | {f"grad/{name}": g for name, g in grads.items()}


@torch.no_grad()
def check_by_differences(model, params, grads, batch, step=1e-5, tolerance=1e-7):
    """Compare one random element of each gradient with a central difference, relative to the largest element."""
    rng = np.random.default_rng(1)
    for name, p in params.items():
        i = int(rng.integers(p.numel()))
        at, before, losses = p.view(-1), p.view(-1)[i].item(), []
        for value in (before + step, before - step):
            at[i] = value
            losses.append(forward(model, *batch)[1].item())
        at[i] = before
        numeric, analytic = (losses[0] - losses[1]) / (2 * step), grads[name].view(-1)[i].item()
        error = abs(numeric - analytic) / grads[name].abs().max().item()
        assert error < tolerance, f"{name}[{i}]: analytic {analytic}, numeric {numeric}"


def train(model, params, batch, make_optimizer):
    """The loss before each of STEPS updates on one batch; leaves the parameters as it found them."""
    start = [p.detach().clone() for p in params.values()]
    optimizer, losses = make_optimizer(params.values()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = forward(model, *batch)[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        for p, value in zip(params.values(), start, strict=True):
            p.copy_(value)
    return torch.stack(losses)


def make_model(tied, seed):
    """The base model with its random weights, the generator for what comes after them, and the config."""
    config = CONFIG | {"tie_word_embeddings": tied}
    model = Qwen2ForCausalLM(Qwen2Config(**config, attn_implementation="eager")).double()
    rng = np.random.default_rng([seed, tied])
    return model, fill(model, rng, ""), rng, config


def make_lora(tied, seed):
    """All arrays of lora_tied.npz or lora_untied.npz but made_by."""
    model, weights, rng, config = make_model(tied, seed)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, lora_dropout=0.0, bias="none")
    model = get_peft_model(model, lora).double()
    adapters = fill(model, rng, "lora_")
    ids, labels = batch = make_batch(seed)
    arrays = {"config": json.dumps(config), "ids": ids, "labels": labels, "rank": RANK, "alpha": ALPHA}
    arrays |= {f"weight/{name}": p for name, p in weights.items()}
    arrays |= {f"lora/{name}": p for name, p in adapters.items()}
    arrays |= gradients(model, adapters, batch)
    return arrays | {f"losses_{name}": train(model, adapters, batch, make) for name, make in OPTIMIZERS.items()}


def make_full(tied, seed, lora):
    """All arrays of full_tied.npz or full_untied.npz but made_by; `lora` holds those of the lora file beside it."""
    model, weights, _, config = make_model(tied, seed)
    assert {f"weight/{name}" for name in weights} == {name for name in lora if name.startswith("weight/")}
    assert all(torch.equal(p, lora[f"weight/{name}"]) for name, p in weights.items())
    ids, labels = batch = make_batch(seed)
    return {"config": json.dumps(config), "ids": ids, "labels": labels} | gradients(model, weights, batch)


# What autograd keeps


def lora_linear(linear, x):
    """h = x A^T and y = x W^T + bias + scale h B^T of a PEFT layer."""
    h = x @ linear.lora_A["default"].weight.T
    return h, linear.base_layer(x) + linear.scaling["default"] * h @ linear.lora_B["default"].weight.T


def heads(y, rotation=None):
    """(1, T, heads * E) -> (heads, T, E), rotated by (cos, sin) if given."""
    y = y.view(LAYER["T"], -1, LAYER["E"]).transpose(0, 1)
    if rotation is None:
        return y
    (cos, sin), (first, second) = rotation, y.chunk(2, dim=-1)
    return y * cos + torch.cat((-second, first), dim=-1) * sin


def rms_norm(norm, x):
    """rstd and the scaled output."""
    rstd = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return rstd, x * rstd * norm.weight


@torch.no_grad()
def layer_by_hand(layer, x, cos, sin):
    """The layer's forward pass from the formulas: {name: tensor}, k and v also as expanded to H heads."""
    attn, mlp, t = layer.self_attn, layer.mlp, {"x": x, "cos": cos, "sin": sin}
    t["rstd1"], t["xn1"] = rms_norm(layer.input_layernorm, x)
    t["hq"], q = lora_linear(attn.q_proj, t["xn1"])
    t["hk"], k = lora_linear(attn.k_proj, t["xn1"])
    t["hv"], v = lora_linear(attn.v_proj, t["xn1"])
    t["q"], t["k"], t["v"] = heads(q, (cos, sin)), heads(k, (cos, sin)), heads(v)
    k, v = (t[name].repeat_interleave(LAYER["H"] // LAYER["K"], dim=0) for name in "kv")
    t["k expanded"], t["v expanded"] = k, v
    scores = t["q"] @ k.mT * LAYER["E"] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    t["p"], t["lse"] = scores.softmax(-1), scores.logsumexp(-1)
    t["ctx"] = (t["p"] @ v).transpose(0, 1).flatten(1)
    t["ho"], out = lora_linear(attn.o_proj, t["ctx"])
    t["mid"] = x + out
    t["rstd2"], t["xn2"] = rms_norm(layer.post_attention_layernorm, t["mid"])
    t["hg"], t["gate"] = lora_linear(mlp.gate_proj, t["xn2"])
    t["hu"], t["up"] = lora_linear(mlp.up_proj, t["xn2"])
    t["silu"] = silu(t["gate"])
    t["act"] = t["silu"] * t["up"]
    t["hd"], _ = lora_linear(mlp.down_proj, t["act"])
    return t


def identify(saved, by_hand):
    """The one name whose values are those of `saved`, up to axes of length 1 and the order of the last axes."""
    views = [saved, saved.mT] + ([saved.transpose(-2, -3)] if saved.dim() > 2 else [])

    def same(want):
        return saved.numel() == want.numel() and any(
            torch.allclose(view.reshape(want.shape), want, rtol=1e-4, atol=1e-5) for view in views)

    (name,) = (name for name, want in by_hand.items() if same(want))
    return name


def make_layer(attention):
    """One decoder layer in float32, as PEFT makes it, with its input x and the tables cos and sin."""
    config = Qwen2Config(
        vocab_size=1, hidden_size=LAYER["D"], intermediate_size=LAYER["F"], num_hidden_layers=1,
        num_attention_heads=LAYER["H"], num_key_value_heads=LAYER["K"], attn_implementation=attention)
    layer = modeling_qwen2.Qwen2DecoderLayer(config, layer_idx=0)
    layer = inject_adapter_in_model(LoraConfig(r=LAYER["R"], target_modules=TARGETS), layer)
    fill(layer, np.random.default_rng(0), "")
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((LAYER["B"], LAYER["T"], LAYER["D"]))).float()
    cos, sin = modeling_qwen2.Qwen2RotaryEmbedding(config)(x, torch.arange(LAYER["T"])[None])
    return layer, x.requires_grad_(), cos, sin


def measure_saved(attention):
    """The tensors that autograd keeps in one forward pass of the layer, parameters left out."""
    layer, x, cos, sin = make_layer(attention)
    # The masks that transformers itself makes: additive for eager; none for sdpa, which is causal by itself.
    mask = torch.full((1, 1, LAYER["T"], LAYER["T"]), -torch.inf).triu(1) if attention == "eager" else None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x, attention_mask=mask, position_embeddings=(cos, sin))
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved = [t.detach() for t in saved if t.untyped_storage().data_ptr() not in parameters]
    by_hand, storages, rows = layer_by_hand(layer, x, cos, sin), {}, []
    for t in saved:
        storage = t.untyped_storage()
        number, _ = storages.setdefault(storage.data_ptr(), (len(storages), storage.nbytes()))
        name, _, expanded = identify(t, by_hand).partition(" ")
        row = {"name": name, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."), "bytes": t.nbytes,
               "storage": number, "is_parameter": False}
        rows.append(row | ({"expanded": True} if expanded else {}))
    return {"bytes": sum(nbytes for _, nbytes in storages.values()), "tensors": rows}


# Writing


def write_npz(path, arrays, made_by):
    """Compressed .npz of tensors, strings and numbers."""
    arrays = {k: v.detach().numpy() if isinstance(v, torch.Tensor) else np.array(v) for k, v in arrays.items()}
    assert all(np.isfinite(a).all() for a in arrays.values() if a.dtype.kind == "f")
    np.savez_compressed(path, made_by=np.array(json.dumps(made_by)), **arrays)
    print(f"{path.name:20s} {path.stat().st_size:9,d} B  {len(arrays) + 1} arrays, loss {arrays['loss']:.6f}")


def write_saved(path, made_by):
    """saved_tensors.json, one tensor a line."""
    report = {"made_by": made_by, "sizes": LAYER} | {name: measure_saved(name) for name in ("eager", "sdpa")}
    text = re.sub(r"\n {4,}", " ", json.dumps(report, indent=1))
    path.write_text(re.sub(r"\n {3}}", " }", text) + "\n")
    sizes = ", ".join(f"{name} {report[name]['bytes']:,d} B" for name in ("eager", "sdpa"))
    print(f"{path.name:20s} {path.stat().st_size:9,d} B  {sizes}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help="folder to write to (default: tests/golden)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, adapters and tokens (default: 0)")
    args = parser.parse_args()
    made_by = {"script": "tools/make_golden.py", "versions": check_versions(), "seed": args.seed}
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for kind in ("tied", "untied"):
        with float64_throughout(modeling_qwen2):
            lora = make_lora(kind == "tied", args.seed)
            full = make_full(kind == "tied", args.seed, lora)
        write_npz(args.out / f"lora_{kind}.npz", lora, made_by)
        write_npz(args.out / f"full_{kind}.npz", full, made_by)
    write_saved(args.out / "saved_tensors.json", made_by)


if __name__ == "__main__":
    main()
