"""PyTorch with transformers and PEFT, in float32 or with the base model in bfloat16.

In bfloat16 the adapters are float32, which is how PEFT loads them, and so are logits in the loss, as in transformers.
A variant is a set of words:

    checkpointing   activation checkpointing, a block at a time
    chunked loss    the head is applied to CHUNK rows at a time, under a checkpoint of its own: no whole logits exist;
                    else transformers' own loss, which forms them
    MeZO            two forward passes, at adapters moved by +eps z and -eps z in place, z drawn again from its seed

live   the most bytes of tensors at once beyond those that were there before a step, from PyTorch's profiler
taken  growth of the resident set, in another step
"""

from itertools import accumulate

import torch
from peft import PeftModel
from torch.autograd.profiler import profile
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from benchmarks.agreement import ESTIMATE, EXACT, ROUNDED, save
from benchmarks.worker import resident_growth, serve

CHUNK = 64
CHECKPOINTING, CHUNKED, MEZO = "checkpointing", "chunked loss", "MeZO"


class PyTorch:
    """One model, of which each variant trains the same adapters."""

    def __init__(self, spec):
        torch.set_num_threads(spec["threads"])
        self.rounded, self.rate, self.eps = spec["dtype"] == "bfloat16", spec["rate"], spec["run"]["mezo_eps"]
        self.base = AutoModelForCausalLM.from_pretrained(spec["folder"], dtype=getattr(torch, spec["dtype"]))
        self.model = PeftModel.from_pretrained(self.base, spec["adapter"], is_trainable=True).train()
        self.adapters = {our_name(name): p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.SGD(self.adapters.values(), lr=self.rate)
        tokens = torch.tensor([spec["tokens"]])
        self.ids, self.labels, self.seed = tokens[:, :-1], tokens[:, 1:].contiguous(), 0
        self.about = {variant: {"kind": self._kind(variant), "timed": True} for variant in spec["variants"]}

    def step(self, variant):
        """The loss."""
        if MEZO in variant:
            loss, slope = self._slope(variant)
            self._move(-self.rate * slope)
            return loss
        loss = self._backward(variant)
        clip_grad_norm_(self.adapters.values(), float("inf"))          # all systems compute the norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradients(self, variant, path):
        """The loss; the gradient, or MeZO's estimate of it along the same z for every variant, goes into a file."""
        self.seed = 0
        if MEZO in variant:
            loss, slope = self._slope(variant)
            made = {name: slope * z for (name, _), z in zip(self.adapters.items(), self._noise())}
        else:
            loss = self._backward(variant)
            made = {name: p.grad for name, p in self.adapters.items()}
        save(path, {name: grad.numpy() for name, grad in made.items()})
        self.optimizer.zero_grad()
        return loss

    def memory(self, variant):
        """Bytes of a step, adapters included."""
        adapters = sum(p.nbytes for p in self.adapters.values())
        taken = resident_growth(lambda: self.step(variant))
        with profile(profile_memory=True) as profiled:
            self.step(variant)
        changes = (event.nbytes() for event in profiled.kineto_results.events() if event.name() == "[memory]")
        return {"live": max(accumulate(changes)) + adapters, "taken": taken and taken + adapters}

    def _kind(self, variant):
        return ESTIMATE if MEZO in variant else ROUNDED if self.rounded else EXACT

    def _loss(self, variant):
        (self.base.activation_checkpointing_enable if CHECKPOINTING in variant else
         self.base.activation_checkpointing_disable)()
        if CHUNKED not in variant:
            return self.model(input_ids=self.ids, labels=self.ids, shift_labels=self.labels, use_cache=False).loss
        hidden = self.base.model(input_ids=self.ids, use_cache=False).last_hidden_state[0]
        chunks = zip(hidden.split(CHUNK), self.labels[0].split(CHUNK))
        return sum(checkpoint(self._chunk, *chunk, use_reentrant=False) for chunk in chunks) / self.labels.numel()

    def _chunk(self, hidden, labels):
        return cross_entropy(self.base.lm_head(hidden).float(), labels, reduction="sum")

    def _backward(self, variant):
        loss = self._loss(variant)
        loss.backward()
        return loss.item()

    @torch.no_grad()
    def _slope(self, variant):
        """(mean loss, c = (L(theta + eps z) - L(theta - eps z)) / (2 eps)) for the z of a new seed."""
        self.seed += 1
        self._move(self.eps)
        above = self._loss(variant).item()
        self._move(-2 * self.eps)
        below = self._loss(variant).item()
        self._move(self.eps)
        return (above + below) / 2, (above - below) / (2 * self.eps)

    @torch.no_grad()
    def _move(self, amount):
        """theta += amount z"""
        for p, z in zip(self.adapters.values(), self._noise()):
            p.add_(z, alpha=amount)

    def _noise(self):
        """z of each adapter in turn."""
        generator = torch.Generator().manual_seed(self.seed)
        return (torch.randn(p.shape, generator=generator) for p in self.adapters.values())


def our_name(name):
    """base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight -> layers.0.mlp.up_proj.lora_A"""
    return name.removeprefix("base_model.model.model.").removesuffix(".default.weight")


if __name__ == "__main__":
    serve(PyTorch)
