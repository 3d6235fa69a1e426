"""tools/random_model.py: the shapes of a preset, the same bytes each time, and codes of the numbers it has in bf16."""

import json

import pytest

from mesp_np.checkpoint import folder
from mesp_np.cli import main
from mesp_np.config import PRESETS
from mesp_np.quantize import quantised_tensors
from tests import op_checks
from tools import random_model

TINY = PRESETS["tiny"]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "mlx-4bit"])
def test_the_folder_loads_with_the_shapes_of_the_preset(tmp_path, dtype):
    random_model.write(tmp_path / "model", TINY, dtype, seed=0)
    checkpoint = folder.load(tmp_path / "model")
    assert bool(checkpoint.config.quantization) == (dtype == "mlx-4bit") and checkpoint.notes == ()
    assert {name: stored.shape for name, stored in checkpoint.weights.items()} == TINY.weight_shapes()


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    files = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        random_model.write(tmp_path / name, TINY, "bf16", seed)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_rows_do_not_depend_on_how_many_are_asked_for():
    matrix = random_model.Random("w", (200, 32), "bf16", seed=1)
    for rows in (slice(0, 1), slice(63, 65), slice(70, 199), slice(130, 999)):
        op_checks.same_bits(matrix[rows], matrix[:200][rows])


def test_codes_are_those_of_the_bf16_model(tmp_path):
    for dtype in ("bf16", "mlx-4bit"):
        random_model.write(tmp_path / dtype, TINY, dtype, seed=0)
    plain, coded = (folder.load(tmp_path / dtype).weights for dtype in ("bf16", "mlx-4bit"))
    expected, name = quantised_tensors(plain, 4, 32), "model.layers.2.mlp.down_proj"
    op_checks.same_bits(coded[name + ".weight"].codes, expected[name + ".weight"][:])
    op_checks.same_bits(coded[name + ".weight"].scales, expected[name + ".scales"][:])


def test_compare_and_plan_need_no_tokenizer(tmp_path, capsys):
    random_model.write(tmp_path / "model", TINY, "mlx-4bit", seed=0)
    flags = ["--model", str(tmp_path / "model"), "--batch-size", "1", "--seq", "16", "--json"]
    assert main(["compare", "--methods", "mebp,mesp-lean", "--rounds", "1", *flags]) == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert all(row["gradient_bits_different"] == 0 for row in methods.values())
    assert main(["plan", "--method", "mesp-lean", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["live_peak_bytes"] == methods["mesp-lean"]["live_peak_bytes"]
