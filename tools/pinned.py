"""Fetch packages with pip, pinned by version and SHA-256: what the make_*.py scripts here work from."""

import subprocess
import sys
from pathlib import Path


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
