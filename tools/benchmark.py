"""Seconds and bytes of a step: this engine beside PyTorch + transformers + PEFT, in one run.

    pip install torch transformers peft                   (only this script needs them)
    python tools/benchmark.py --preset qwen2.5-0.5b --seq 256 --rounds 7

All contenders compute the same step: LoRA on all seven projections, SGD, float32, the same weights, adapters and
tokens, the same number of threads, and the global gradient norm that trainers report. So their first losses and
gradient norms must agree to 1e-3, or nothing is reported. Weights are random; time does not depend on them.

Each contender has a process of its own, which is blocked on a pipe while another works; rounds go through all of
them in turn, so that a slow moment of the machine meets all. The first two steps of each are not timed.

PyTorch   forms whole logits, as transformers does when it is given labels. Its memory is the growth of the resident
          set over a step, up to the high-water mark (Linux only), after the C library gave back what was free.
ours      stores weights as f32, as PyTorch does, or as bf16, widened tile by tile. Its memory is the exact live peak.

Adapters count as memory on both sides, weights on neither.
"""

import argparse
import ctypes
import gc
import multiprocessing
import re
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from zlib import crc32

import numpy as np

from mesp_np import PRESETS, Batch, Engine, RunConfig, plan_step
from mesp_np.cli.flags import cores
from mesp_np.methods import METHODS
from mesp_np.ops.quant import round_bf16

STORED = {"f32": lambda weight: weight, "bf16": round_bf16}
EXACT = [name for name, method in METHODS.items() if method.exact]
RATE = 1e-6                      # small, so that every round does the same work on the same numbers
TOLERANCE = 1e-3
BASELINE = "PyTorch, checkpointing"


def draw(seed, name, shape):
    """Random float32 values of a weight or adapter, each exactly a bfloat16 number; norms are 1."""
    if "norm" in name:
        return np.ones(shape, np.float32)
    rng = np.random.default_rng([seed, crc32(name.encode())])
    noise = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    return (round_bf16(noise).astype(np.uint32) << 16).view(np.float32)


def draw_batch(args):
    """ids and labels (1, T): the next token, none after the last."""
    ids = np.random.default_rng(args.seed).integers(PRESETS[args.preset].vocab_size, size=(1, args.seq))
    return ids, np.append(ids[:, 1:], [[-100]], axis=1)


# The contenders


class Ours:
    """This engine with one method and one stored form of the weights."""

    def __init__(self, args, method, stored):
        config = PRESETS[args.preset]
        run = RunConfig(method=method, loss=args.loss, batch_size=1, seq=args.seq, optimizer="sgd", weight_decay=0.0,
                        threads=args.threads)
        weights = {name: STORED[stored](draw(args.seed, name, shape)) for name, shape in config.weight_shapes().items()}
        self.engine = Engine(config, weights, run, plan_step(config, run, weights=weights).extent_bytes)
        for p in self.engine.parameters:
            p.value[:] = draw(args.seed, p.name, p.value.shape)
        self.batch = Batch.of(*draw_batch(args))

    def step(self):
        """(loss, gradient norm)"""
        result = self.engine.step([self.batch], RATE)
        return result.loss, result.grad_norm

    def peak_bytes(self):
        """The exact live peak of the last step."""
        return self.engine.arena.ledger.live_peak


class PyTorch:
    """transformers + PEFT, in the only process that imports them."""

    def __init__(self, args, checkpointing):
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import Qwen2Config, Qwen2ForCausalLM
        torch.set_num_threads(args.threads)
        model = Qwen2ForCausalLM(Qwen2Config(**PRESETS[args.preset].to_json())).float()
        for name, p in model.named_parameters():
            p.data.numpy()[:] = draw(args.seed, name, p.shape)
        run = RunConfig()
        lora = LoraConfig(r=run.rank, lora_alpha=run.alpha, target_modules=list(run.targets), lora_dropout=0.0)
        self.model = get_peft_model(model, lora).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        adapters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name, p in adapters.items():
            name = name.removeprefix("base_model.model.model.").removesuffix(".default.weight")
            p.data.numpy()[:] = draw(args.seed, name, p.shape)
        self.adapters = list(adapters.values())
        self.optimizer = torch.optim.SGD(self.adapters, lr=RATE)
        self.ids = torch.from_numpy(draw_batch(args)[0])

    def step(self):
        """(loss, gradient norm)"""
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss      # transformers shifts labels
        loss.backward()
        norm = sum(p.grad.square().sum() for p in self.adapters) ** 0.5
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()

    def peak_bytes(self):
        """High-water mark of one more step above what was resident before it, and the adapters; None if not known."""
        try:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            before = resident_bytes("VmRSS")
            self.step()
            return resident_bytes("VmHWM") - before + sum(p.nbytes for p in self.adapters)
        except (AttributeError, OSError):
            return None


def resident_bytes(field):
    """A size in kB in this process's status, in bytes."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


# Their processes


class Worker:
    """A contender in a process of its own, which does one thing at a time, when asked."""

    def __init__(self, contender, *args):
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        context.Process(target=serve, args=(end, contender, *args), daemon=True).start()
        end.close()
        self.pipe.recv()

    def ask(self, method):
        """(what the contender's method returned, seconds it took)"""
        self.pipe.send(method)
        return self.pipe.recv()


def serve(pipe, contender, *args):
    """Make a contender and answer for it, until the other end of the pipe is gone."""
    made = contender(*args)
    pipe.send("ready")
    while True:
        method = pipe.recv()
        began = time.perf_counter()
        answer = getattr(made, method)()
        pipe.send((answer, time.perf_counter() - began))


def start(args):
    """{name: Worker}, made one after another."""
    specs = {BASELINE: (PyTorch, args, True), "PyTorch": (PyTorch, args, False)}
    specs |= {f"{method}, {stored}": (Ours, args, method, stored) for method in args.methods for stored in args.stored}
    workers = {}
    for name, spec in specs.items():
        print(f"loading {name}", file=sys.stderr)
        workers[name] = Worker(*spec)
    return workers


# The measurement


def check(answers):
    """The largest relative difference of losses and gradient norms from PyTorch's; refuses a large one."""
    values = np.array(list(answers.values()))
    worst = np.abs(values / values[0] - 1).max()
    if not worst < TOLERANCE:
        raise SystemExit("contenders do not compute the same: " + "; ".join(
            f"{name}: loss {loss:.6f}, gradient norm {norm:.6f}" for name, (loss, norm) in answers.items()))
    return worst


def measure(workers, rounds):
    """{name: [seconds of each round]}"""
    seconds = {name: [] for name in workers}
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        for name, worker in workers.items():
            seconds[name].append(worker.ask("step")[1])
    return seconds


def report(seconds, peaks):
    """The table; each time is followed by its ratio to PyTorch with checkpointing."""
    medians, least = ({name: pick(times) for name, times in seconds.items()} for pick in (statistics.median, min))
    print(f"{'':24}{'median s':>10}{'ratio':>7}{'min s':>10}{'ratio':>7}{'peak MiB':>11}")
    for name, peak in peaks.items():
        times = "".join(f"{side[name]:10.4f}{side[name] / side[BASELINE]:7.2f}" for side in (medians, least))
        print(f"{name:24}{times}{'unknown' if peak is None else f'{peak / 2**20:,.1f}':>11}")


def names_from(allowed):
    """An argparse type: names of `allowed`, joined by commas."""
    def parse(text):
        names = text.split(",")
        if not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"choose from {','.join(allowed)}")
        return names
    return parse


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen2.5-0.5b")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each contender")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--methods", type=names_from(EXACT), default="mesp-lean,mebp", help=",".join(EXACT))
    parser.add_argument("--stored", type=names_from(STORED), default="bf16,f32", help="forms of our weights")
    parser.add_argument("--loss", default=RunConfig.loss, help="how much of our logits exists at once")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    workers = start(args)
    answers = {name: worker.ask("step")[0] for name, worker in workers.items()}
    worst = check(answers)
    peaks = {name: worker.ask("peak_bytes")[0] for name, worker in workers.items()}
    seconds = measure(workers, args.rounds)
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "numpy", "numba"))
    loss, norm = answers[BASELINE]
    print(f"{args.preset}, B=1 T={args.seq}, {args.threads} threads, {args.rounds} rounds, loss {args.loss}; {packages}")
    print(f"first loss {loss:.6f}, gradient norm {norm:.6f}; largest relative difference {worst:.1e}")
    report(seconds, peaks)


if __name__ == "__main__":
    main()
