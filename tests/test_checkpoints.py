"""Block inputs: a checkpoint every k layers, layers that are stored, and where checkpoints wait."""

import errno
import os

import numpy as np
import pytest

from mesp_np.config import PRESETS, RunConfig
from mesp_np.engine import plan_step
from mesp_np.errors import UserError
from mesp_np.methods import checkpoints
from tests import small
from tests.test_bits import different
from tests.test_plan_equals_run import check

DEEP = small.model_config(num_hidden_layers=5)


def gradients(**changes):
    with small.engine(DEEP, **changes) as engine:
        return engine.gradients(small.batch(DEEP, 3, 13))


def peak(**changes):
    run = RunConfig(**(dict(batch_size=1, seq=256, optimizer="sgd", update="fused") | changes))
    return plan_step(PRESETS["qwen2.5-0.5b"], run)


EXACT = [dict(checkpoint_every=2), dict(checkpoint_every=3), dict(checkpoint_every=99), dict(stored_layers=2),
         dict(stored_layers=5), dict(stored_layers=99), dict(checkpoint_every=3, stored_layers=2),
         dict(checkpoint_store="disk"), dict(checkpoint_store="disk", checkpoint_every=2, stored_layers=1),
         dict(checkpoint_every=2, layers=(2, 4)), dict(stored_layers=1, layers=(3,))]


@pytest.mark.parametrize("changes", EXACT, ids=str)
@pytest.mark.parametrize("method", ["mebp", "mesp-lean"])
def test_bits_do_not_change(method, changes):
    layers = {name: changes[name] for name in ("layers",) if name in changes}
    assert different(gradients(method=method, **changes), gradients(method="store", **layers)) == []


@pytest.mark.parametrize("changes", [*EXACT, dict(checkpoint_store="bf16"), dict(update="fused", stored_layers=1),
                                     dict(checkpoint_store="bf16", checkpoint_every=2),
                                     dict(checkpoint_store="disk", grad_accumulation=2)], ids=str)
def test_plan_equals_run(changes):
    check(DEEP, method="mesp-lean", **changes)


def test_rounded_checkpoints_are_near_and_not_exact():
    exact, rounded = gradients(), gradients(checkpoint_store="bf16")
    top = [name for name in exact if ".4." in name]
    assert different(exact, rounded)
    for name in top:
        error = np.linalg.norm(rounded[name] - exact[name]) / np.linalg.norm(exact[name])
        assert 0 < error < 0.02, name


def test_bytes_of_each():
    config, N = PRESETS["qwen2.5-0.5b"], 256
    one = 4 * N * config.hidden_size                                             # a block input
    whole = peak().live_peak_bytes
    assert whole - peak(checkpoint_store="disk").live_peak_bytes == 23 * one
    assert whole - peak(checkpoint_store="bf16").live_peak_bytes == 23 * one // 2
    assert peak(checkpoint_every=4).live_peak_bytes == whole - (24 - 6 - 3) * one
    assert peak(stored_layers=24).live_peak_bytes == peak(method="store-lean").live_peak_bytes


def test_flops_of_each():
    """A checkpoint every k layers costs forwards of k - 1 in k blocks; a stored layer saves its replay."""
    assert peak(stored_layers=24).flops == peak(method="store-lean").flops
    recompute = [peak(stored_layers=n).flops["recompute"] for n in (0, 6, 12)]
    assert recompute[0] - recompute[1] == recompute[1] - recompute[2] > 0
    forward = peak(method="mezo").flops["forward"] / 2
    extra = [peak(checkpoint_every=k).flops["recompute"] - recompute[0] for k in (2, 4)]
    assert extra[0] < 12 / 24 * forward < extra[1] < 18 / 24 * forward


def test_a_full_disk_is_one_clear_line(monkeypatch):
    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class File:
        seek = close = lambda *_: None
        write = full

    monkeypatch.setattr(checkpoints.tempfile, "TemporaryFile", File)
    with pytest.raises(UserError, match="7,488 B in a temporary file cannot be written .*No space left"):
        gradients(checkpoint_store="disk")


def test_a_file_that_became_shorter_is_one_clear_line(monkeypatch):
    plain = checkpoints.OnDisk._read

    def cut(self, index, x):
        self.file.truncate(index * x.nbytes + 8)
        plain(self, index, x)

    monkeypatch.setattr(checkpoints.OnDisk, "_read", cut)
    with pytest.raises(UserError, match="7,488 B in a temporary file cannot be read again .*become shorter"):
        gradients(checkpoint_store="disk")


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(monkeypatch):
    asked = []

    def full(descriptor, start, size):
        asked.append((start, size))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints.os, "posix_fallocate", full, raising=False)
    for changes, layers in (({}, 5), ({"stored_layers": 2}, 3)):
        with small.engine(DEEP, checkpoint_store="disk", **changes) as engine, pytest.raises(
                UserError, match="in a temporary file cannot be kept .*No space left.*TMPDIR"):
            engine.reserve(39)
        assert asked.pop() == (0, layers * 39 * DEEP.hidden_size * 4)
    with small.engine(DEEP) as engine:
        engine.reserve(39)
    assert not asked


def test_the_file_is_gone_afterwards(monkeypatch):
    made = []
    plain = checkpoints.tempfile.TemporaryFile
    monkeypatch.setattr(checkpoints.tempfile, "TemporaryFile", lambda: made.append(plain()) or made[0])
    gradients(checkpoint_store="disk")
    assert made[0].closed
