"""The closed formulas in the methods' docstrings against the ledger, to the byte."""

import re

import numpy as np
import pytest

from mesp_np import methods
from mesp_np.config import PRESETS
from mesp_np.engine import plan_step
from mesp_np.ops import attention
from mesp_np.ops.matmul import scratch_elements
from tests import small

FORMULA = re.compile(r"^    (\w+) = (.+)$", re.MULTILINE)


def evaluate(text, letters):
    """The formulas of a docstring, each with those before it at hand."""
    for name, expression in FORMULA.findall(text.partition("in elements beyond")[2]):
        letters[name] = eval(expression, {"max": max, "min": min}, letters)
    return letters


def closed_form(config, run):
    """Live peak in bytes, by the docstrings alone."""
    B, T, threads = run.batch_size, run.seq, run.threads
    letters = dict(L=config.num_hidden_layers, B=B, T=T, N=B * T, D=config.hidden_size, F=config.intermediate_size,
                   H=config.num_attention_heads, E=config.head_dim, Q=config.query_width, KV=config.key_width,
                   R=run.rank, V=config.vocab_size, W1=threads, moments=2 if run.optimizer == "adamw" else 0)
    variant, size = run.loss_tile()
    letters["C"] = min(run.row_tile // T * T or run.row_tile, B * T)
    letters["W"] = min(size, letters["V"])
    letters["CL"] = min(run.row_tile if variant == "vocab" else size or B * T, B * T)
    letters["scores"] = attention.backward_scratch(min(T, letters["C"]), T, config.head_dim)
    letters["weight_tile"] = scratch_elements()
    evaluate(methods.__doc__, letters)
    letters["head"] = letters["head_vocab" if variant == "vocab" else "head_rows"]
    evaluate(methods.METHODS[run.method].about, letters)
    return np.dtype(run.dtype).itemsize * (letters["fixed"] + letters["peak"]) + 24 * B * T + 8


@pytest.mark.parametrize("method", methods.METHODS)
@pytest.mark.parametrize("preset", ["tiny", "qwen2.5-0.5b", "qwen2.5-3b"])
@pytest.mark.parametrize("changes", [
    dict(batch_size=1, seq=256), dict(batch_size=1, seq=1024, loss="vocab:2048"),
    dict(batch_size=1, seq=256, row_tile=64), dict(batch_size=2, seq=200, threads=2),
    dict(batch_size=3, seq=67, rank=32, loss="full"),
    dict(batch_size=1, seq=128, rank=64, optimizer="adamw"), dict(batch_size=1, seq=31, dtype="float64", loss="rows:1"),
], ids=str)
def test_live_peak(method, preset, changes):
    run = small.run_config(method=method, **({"loss": "rows:8"} | changes))
    planned = plan_step(PRESETS[preset], run)
    assert planned.live_peak_bytes == closed_form(PRESETS[preset], run)
