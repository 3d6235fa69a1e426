"""JAX: the decoder in jax.numpy, compiled by XLA, in float32, with jax.checkpoint around a block in a scan over layers.

In a plain loop over layers XLA's compiler for CPUs merges the second forward pass with the first, and nothing is saved.
A variant is

    remat                 with whole logits
    remat, chunked loss   with those of CHUNK rows at a time, under a checkpoint of their own

live   what XLA plans: temporary buffers and results of the compiled step, adapters included
taken  growth of the resident set

XLA takes all cores, so its seconds are taken only when the others have as many.
"""

import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from benchmarks.agreement import EXACT, save
from benchmarks.worker import resident_growth, serve

CHUNK = 64
CHUNKED = "chunked loss"
LAYER, ADAPTER = "model.layers.", "base_model.model."


class Jax:
    """Weights, those of the layers apart, and adapters are dictionaries; each variant is a compiled function of them.

    weights          checkpoint name -> array
    layers, adapters name within a layer -> (L, ...) array
    """

    def __init__(self, spec):
        self.config, self.scale = spec["config"], spec["run"]["alpha"] / spec["run"]["rank"]
        tokens = jnp.array(spec["tokens"])
        self.ids, self.labels = tokens[:-1], tokens[1:]
        self.frozen = read(Path(spec["folder"], "model.safetensors"), self.config["num_hidden_layers"])
        _, self.adapters = read(Path(spec["adapter"], "adapter_model.safetensors"), self.config["num_hidden_layers"])
        self.rate, timed = spec["rate"], spec["threads"] == os.cpu_count()
        self.compiled = {variant: self._compile(variant) for variant in spec["variants"]}
        self.about = {variant: {"kind": EXACT, "timed": timed} for variant in spec["variants"]}

    def step(self, variant):
        """The loss."""
        loss, _, self.adapters = self.compiled[variant](self.adapters, self.frozen)
        return loss.item()

    def gradients(self, variant, path):
        """The loss; the gradient goes into a file."""
        loss, gradients = jax.jit(jax.value_and_grad(partial(self._loss, variant)))(self.adapters, self.frozen)
        save(path, {f"layers.{layer}.{name.removesuffix('.weight')}": np.asarray(grad[layer])
                    for name, grad in gradients.items() for layer in range(len(grad))})
        return loss.item()

    def memory(self, variant):
        """Bytes of a step, adapters included."""
        plan = self.compiled[variant].memory_analysis()
        adapters = sum(array.nbytes for array in self.adapters.values())
        results = plan.output_size_in_bytes - plan.alias_size_in_bytes
        taken = resident_growth(lambda: self.step(variant))
        return {"live": plan.temp_size_in_bytes + results + adapters, "taken": taken and taken + adapters}

    def _compile(self, variant):
        """The step, which gives the adapters' place to the new ones."""
        return jax.jit(partial(self._step, variant), donate_argnums=0).lower(self.adapters, self.frozen).compile()

    def _step(self, variant, adapters, frozen):
        loss, gradients = jax.value_and_grad(partial(self._loss, variant))(adapters, frozen)
        norm = jnp.sqrt(sum(jnp.square(grad).sum() for grad in gradients.values()))
        return loss, norm, {name: value - self.rate * gradients[name] for name, value in adapters.items()}

    def _loss(self, variant, adapters, frozen):
        weights, layers = frozen
        x = weights["model.embed_tokens.weight"][self.ids]                                   # (T, D)
        x, _ = jax.lax.scan(jax.checkpoint(self._block, prevent_cse=False), x, (layers, adapters))
        x = self._norm(x, weights["model.norm.weight"])
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        if CHUNKED not in variant:
            return row_loss(head, (x, self.labels)).mean()
        return jax.lax.map(jax.checkpoint(partial(row_loss, head)), (x, self.labels), batch_size=CHUNK).mean()

    def _block(self, x, layer):
        """(x, None) after one layer, which scan takes from the stacks."""
        weights, adapters = layer

        def linear(x, module):
            h = x @ adapters[f"{module}.lora_A.weight"].T
            y = x @ weights[f"{module}.weight"].T + self.scale * (h @ adapters[f"{module}.lora_B.weight"].T)
            return y + weights[f"{module}.bias"] if f"{module}.bias" in weights else y

        xn = self._norm(x, weights["input_layernorm.weight"])
        q, k, v = (linear(xn, f"self_attn.{name}_proj") for name in "qkv")
        x = x + linear(self._attention(q, k, v), "self_attn.o_proj")
        xn = self._norm(x, weights["post_attention_layernorm.weight"])
        gate, up = linear(xn, "mlp.gate_proj"), linear(xn, "mlp.up_proj")
        return x + linear(jax.nn.silu(gate) * up, "mlp.down_proj"), None

    def _attention(self, q, k, v):
        c, T = self.config, len(q)
        H, K, E = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q = self._rotate(q.reshape(T, H, E)).reshape(T, K, H // K, E)
        k, v = self._rotate(k.reshape(T, K, E)), v.reshape(T, K, E)
        scores = jnp.einsum("tkge,ske->kgts", q, k) * E ** -0.5
        p = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf))
        return jnp.einsum("kgts,ske->tkge", p, v).reshape(T, H * E)

    def _rotate(self, x):
        """RoPE on x (T, heads, E), whose halves are the pairs."""
        T, _, E = x.shape
        angles = jnp.outer(jnp.arange(T), self.config["rope_theta"] ** (-jnp.arange(0, E, 2) / E))[:, None]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _norm(self, x, weight):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weight


def row_loss(head, row):
    """The loss of a row x (D,) and its label, or of several (N, D) and theirs."""
    x, label = row
    logits = x @ head.T
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]


def read(path, count):
    """(checkpoint name -> array outside of the layers, name within a layer -> (L, ...) array) of a file."""
    with safe_open(path, "np") as file:
        names = {name.removeprefix(ADAPTER): name for name in file.keys()}
        within = {name.removeprefix(f"{LAYER}0.") for name in names if name.startswith(f"{LAYER}0.")}
        return ({name: jnp.asarray(file.get_tensor(stored)) for name, stored in names.items() if LAYER not in name},
                {name: jnp.stack([file.get_tensor(names[f"{LAYER}{layer}.{name}"]) for layer in range(count)])
                 for name in sorted(within)})


if __name__ == "__main__":
    serve(Jax)
