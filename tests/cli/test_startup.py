"""What a command loads: what it works with and nothing else, so that it starts at once and takes little memory."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import mesp_np
from tests.training import FAST

REPORT = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(list(sys.modules)), file=sys.stderr))
sys.argv[1:] = ARGV
CODE
"""
RUN = "from mesp_np.__main__ import main; sys.exit(main())"


def loaded(*argv, code=RUN):
    """Top-level modules, and those of mesp_np, that a process has loaded at its end."""
    done = subprocess.run([sys.executable, "-c", REPORT.replace("ARGV", repr(argv)).replace("CODE", code)],
                          capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    names = json.loads(done.stderr.splitlines()[-1])
    return {name for name in names if "." not in name or name.startswith("mesp_np.")}


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["nonsense"], []], ids=" ".join)
def test_help_needs_the_standard_library_alone(argv):
    found = loaded(*argv)
    assert not found & {"numpy", "numba", "rich", "psutil"}
    assert {name for name in found if name.startswith("mesp_np.")} <= {"mesp_np.__main__", "mesp_np.cli",
                                                                      "mesp_np.cli.texts", "mesp_np.errors"}


@pytest.mark.parametrize("argv", [["plan", "--model", "qwen2.5-0.5b", "--seq", "16"], ["plan", "--model", "MODEL"],
                                  ["show", "lora"], ["train", "--help"], ["compare", "--methods", "none"]],
                         ids=" ".join)
def test_what_runs_no_kernel_starts_without_numba(argv, model):
    found = loaded(*[model if word == "MODEL" else word for word in argv])
    assert "numpy" in found
    assert not found & {"numba", "llvmlite", "jinja2", "tokenizers", "huggingface_hub", "psutil"}


def test_a_command_loads_no_other_command():
    commands = {f"mesp_np.cli.{name}" for name in mesp_np.cli.COMMANDS}
    for name in mesp_np.cli.COMMANDS:
        assert commands & loaded(name, "--help") == {f"mesp_np.cli.{name}"}


def test_a_run_on_plain_text_compiles_no_chat_template(model, data, tmp_path):
    """GIVEN a folder with a template, even a broken one THEN a run that renders no conversation has no use for it."""
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if %}")
    found = loaded("train", "--model", str(folder), "--data", data, "--run-dir", str(tmp_path / "run"), *FAST,
                   "--iters", "1")
    assert (tmp_path / "run" / "adapter").exists()
    assert {"numba", "tokenizers"} <= found and not found & {"jinja2", "huggingface_hub", "psutil"}


def test_the_librarys_names_are_there_and_cost_nothing_before_they_are_used():
    names = loaded(code="import mesp_np")
    assert "mesp_np" in names and "numpy" not in names
    for name in mesp_np.__all__:
        assert getattr(mesp_np, name) is not None and name in dir(mesp_np)
    with pytest.raises(AttributeError, match="no attribute 'engine_of'"):
        mesp_np.engine_of  # noqa: B018
