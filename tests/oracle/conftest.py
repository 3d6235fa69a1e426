"""Folders of a real model, made once into a place that the environment names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "MESP_NP_ORACLE_DATA"
TOOLS = Path(__file__).parents[2] / "tools"
FORMS = {"bf16": [], "f16": ["--dtype", "f16"], "f32": ["--dtype", "f32"], "bf16-2": ["--shards", "2"],
         "llama": ["--arch", "llama"], "mlx-4bit": ["--dtype", "mlx-4bit"]}


@pytest.fixture(scope="session")
def smollm2():
    """A function from one of FORMS to the folder of SmolLM2-135M-Instruct in that form."""
    if VARIABLE not in os.environ:
        pytest.skip(f"no real model: run `{VARIABLE}=DIR python -m pytest -m oracle`, where 1.7 GB may be put into DIR")

    def folder(form):
        path = Path(os.environ[VARIABLE]) / f"smollm2-{form}"
        if not path.exists():
            pytest.importorskip("gguf")
            subprocess.run([sys.executable, TOOLS / "make_smollm2.py", path, *FORMS[form]], check=True)
        return path

    return folder
