"""Seconds and bytes of a step: this engine beside PyTorch + transformers + PEFT, in one run.

    pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2          (only tools need them)
    python tools/benchmark.py --preset qwen2.5-0.5b --seq 256 --rounds 7

All contenders compute the same step: LoRA on all seven projections, SGD, float32, the same weights, adapters, tokens
and number of threads, and the global gradient norm. So their first losses and gradient norms must agree to 1e-3, or
nothing is reported. Weights are random; time does not depend on them.

PyTorch forms whole logits, as transformers does when it is given labels. Ours has its weights stored as f32, as
PyTorch has, or as bf16, widened tile by tile.

Time      Each contender has a process of its own, blocked on a pipe while another works. Rounds go through all of
          them in turn, after a few steps that are not timed. The machine should be quiet: PyTorch's threads wait for
          the slowest, so a busy core costs it more than ours.
live      The most bytes of tensors at once: from PyTorch's profiler, from our ledger. Compare these.
taken     What that takes from the machine: for PyTorch the growth of the resident set to its high-water mark (Linux
          only), after the C library gave back what was free; it has the holes of the heap in it. For us the arena.

Adapters are in both figures on both sides, weights in none.
"""

import argparse
import ctypes
import gc
import multiprocessing
import re
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from statistics import median
from zlib import crc32

import numpy as np
import psutil

from mesp_np import PRESETS, Batch, Engine, RunConfig, plan_step
from mesp_np.cli.flags import cores
from mesp_np.methods import METHODS
from mesp_np.ops.quant import round_bf16

METHOD_NAMES = [method.name for method in METHODS.values() if method.exact]
STORED = {"f32": np.asarray, "bf16": round_bf16}
RATE = 1e-6                      # small, so that every round meets the same numbers
TOLERANCE = 1e-3
BASELINE = "PyTorch, checkpointing"


def draw(seed, name, shape):
    """Random float32 values of a weight or adapter, each exactly a bfloat16 number; norms are 1."""
    if "norm" in name:
        return np.ones(shape, np.float32)
    rng = np.random.default_rng([seed, crc32(name.encode())])
    noise = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return (round_bf16(noise).astype(np.uint32) << 16).view(np.float32)


def draw_ids(config, run):
    """(1, T) random tokens."""
    return np.random.default_rng(run.seed).integers(config.vocab_size, size=(1, run.seq))


class Ours:
    """This engine; `store` turns float32 weights into their stored form."""

    def __init__(self, config, run, store):
        weights = {name: store(draw(run.seed, name, shape)) for name, shape in config.weight_shapes().items()}
        self.engine = Engine(config, weights, run, plan_step(config, run, weights=weights).extent_bytes)
        for p in self.engine.parameters:
            p.value[:] = draw(run.seed, p.name, p.value.shape)
        ids = draw_ids(config, run)
        self.batch = Batch.of(ids, np.append(ids[:, 1:], [[-100]], axis=1))

    def step(self):
        """(loss, gradient norm)"""
        result = self.engine.step([self.batch], RATE)
        return result.loss, result.grad_norm

    def peaks(self):
        """(live, taken) bytes of the last step."""
        return self.engine.arena.ledger.live_peak, self.engine.arena.extent


class PyTorch:
    """transformers + PEFT, in the only processes that import them."""

    def __init__(self, config, run, checkpointing):
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen2Config, Qwen2ForCausalLM
        torch.set_num_threads(run.threads)
        base = Qwen2ForCausalLM(Qwen2Config(**config.to_json())).float()
        for name, p in base.named_parameters():
            p.data.numpy()[:] = draw(run.seed, name, p.shape)
        lora = LoraConfig(r=run.rank, lora_alpha=run.alpha, target_modules=list(run.targets), lora_dropout=0.0)
        self.model = get_peft_model(base, lora).train()
        if checkpointing:
            base.activation_checkpointing_enable()
        adapters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name, p in adapters.items():
            ours = name.removeprefix("base_model.model.model.").removesuffix(".default.weight")
            p.data.numpy()[:] = draw(run.seed, ours, p.shape)
        self.adapters = list(adapters.values())
        self.optimizer = torch.optim.SGD(self.adapters, lr=RATE)
        self.ids = torch.from_numpy(draw_ids(config, run))

    def step(self):
        """(loss, gradient norm)"""
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss       # transformers shifts labels
        loss.backward()
        norm = sum(p.grad.square().sum() for p in self.adapters) ** 0.5
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()

    def peaks(self):
        """(live, taken) bytes of further steps."""
        adapters = sum(p.nbytes for p in self.adapters)
        return self._live_growth() + adapters, self._resident_growth() + adapters

    def _live_growth(self):
        from torch.autograd.profiler import profile
        with profile(profile_memory=True) as profiled:
            self.step()
        return max(accumulate(e.nbytes() for e in profiled.kineto_results.events() if e.name() == "[memory]"))

    def _resident_growth(self):
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")       # the high-water mark starts anew
        except (AttributeError, OSError):
            return float("nan")
        before = resident_bytes("VmRSS")
        self.step()
        return resident_bytes("VmHWM") - before


def resident_bytes(field):
    """One of this process's sizes, which Linux states in kB."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


class Worker:
    """A contender in a process of its own."""

    def __init__(self, contender, *args):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, contender, *args), daemon=True).start()
        theirs.close()
        self.pipe.recv()

    def ask(self, method):
        """(what the contender's method returned, the seconds it took)"""
        self.pipe.send(method)
        return self.pipe.recv()


def serve(pipe, contender, *args):
    """Make a contender and call the methods asked for, until the pipe is closed."""
    made = contender(*args)
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            method = getattr(made, pipe.recv())
            began = time.perf_counter()
            answer = method()
            pipe.send((answer, time.perf_counter() - began))


def start(args):
    """Name of a contender -> its Worker."""
    config = PRESETS[args.preset]
    runs = [RunConfig(method=method, loss=args.loss, batch_size=1, seq=args.seq, optimizer="sgd", weight_decay=0.0,
                      threads=args.threads, seed=args.seed) for method in args.methods]
    specs = {BASELINE: (PyTorch, config, runs[0], True), "PyTorch": (PyTorch, config, runs[0], False)}
    specs |= {f"{run.method}, {stored}": (Ours, config, run, STORED[stored]) for run in runs for stored in args.stored}
    return {name: Worker(*spec) for name, spec in specs.items()}


def check(answers):
    """The largest relative difference of a loss or gradient norm from the first contender's; exits if it is large."""
    values = np.array(list(answers.values()))
    worst = np.abs(values / values[0] - 1).max()
    if not worst < TOLERANCE:
        raise SystemExit(f"the contenders compute different things: (loss, gradient norm) are {answers}")
    return worst


def measure(workers, rounds):
    """Name of a contender -> seconds of each of its steps."""
    seconds = {name: [] for name in workers}
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        for name, worker in workers.items():
            seconds[name].append(worker.ask("step")[1])
    return seconds


def report(seconds, peaks):
    """The table; each time is followed by its ratio to PyTorch's with checkpointing."""
    print(f"{'':24}{'median s':>10}{'ratio':>7}{'min s':>10}{'ratio':>7}{'live MiB':>10}{'taken MiB':>11}")
    for name, (live, taken) in peaks.items():
        pairs = [(pick(seconds[name]), pick(seconds[BASELINE])) for pick in (median, min)]
        times = "".join(f"{own:10.4f}{own / base:7.2f}" for own, base in pairs)
        print(f"{name:24}{times}{live / 2**20:10,.1f}{taken / 2**20:11,.1f}")


def names(text):
    return text.split(",")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen2.5-0.5b")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each contender")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--methods", type=names, default="mesp-lean,mebp", help=f"from {','.join(METHOD_NAMES)}")
    parser.add_argument("--stored", type=names, default="bf16,f32", help=f"from {','.join(STORED)}")
    parser.add_argument("--loss", default=RunConfig.loss, help="rows[:C], vocab[:C] or full, for ours")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := {*args.methods, *args.stored} - {*METHOD_NAMES, *STORED}:
        parser.error(f"unknown: {', '.join(unknown)}")
    load = psutil.getloadavg()[0]
    workers = start(args)
    answers = {name: worker.ask("step")[0] for name, worker in workers.items()}
    worst = check(answers)
    peaks = {name: worker.ask("peaks")[0] for name, worker in workers.items()}
    seconds = measure(workers, args.rounds)
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "numpy", "numba")))
    print(f"{args.preset}, batch 1 x {args.seq}, our loss {args.loss}, {args.threads} threads, {args.rounds} rounds, "
          f"load average before the run {load:.1f}")
    loss, norm = answers[BASELINE]
    print(f"loss {loss:.6f}, gradient norm {norm:.6f}, largest relative difference {worst:.1e}")
    report(seconds, peaks)


if __name__ == "__main__":
    main()
