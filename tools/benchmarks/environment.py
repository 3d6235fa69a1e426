"""The environment of the systems that this project is measured beside, made when it is not there.

Each group is installed by itself, so that one that cannot be had leaves the others as they are.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from pinned import JAX, MLX, PYTORCH

GROUPS = {"pytorch": PYTORCH, "jax": JAX, "mlx": MLX}
NAME = "mesp-np-bench"
FIND = """
import json, sys
from importlib.metadata import distributions
found = {made.name: made.version for made in distributions()}
print(json.dumps({name: found[name] for name in sys.argv[1:] if name in found}))
"""


def default_folder():
    """A place in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", NAME)


def make(folder, groups):
    """(the environment's interpreter, group -> why it could not be installed)

    groups  names of GROUPS; what is there in its pinned version is left alone
    """
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=True)
    failed = {}
    for group in groups:
        print(f"{group} in {folder}", file=sys.stderr)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements(group)]
        result = subprocess.run(pip, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if result.returncode:
            errors = [line for line in result.stderr.split("\n") if line.startswith("ERROR")]
            failed[group] = f"pip: {errors[-1] if errors else result.stderr[-200:]}"
    return python, failed


def requirements(group):
    """As pip wants them."""
    return [f"{package}=={version}" for package, version in GROUPS[group].items()]


def versions(python):
    """Package -> version, of those that are installed there."""
    names = [package.partition("[")[0] for group in GROUPS.values() for package in group]
    found = subprocess.run([python, "-c", FIND, *names], capture_output=True, text=True, check=True)
    return json.loads(found.stdout)
