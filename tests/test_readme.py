"""What the README says can be typed, and runs."""

import re
import shlex
from pathlib import Path

import pytest

from mesp_np.cli import COMMANDS, main

ROOT, FLAG = Path(__file__).parents[1], r"--[a-z][a-z-]*"
README = (ROOT / "README.md").read_text(encoding="utf-8")
SPANS = re.findall(r"`([^`\n]+)`", README) + [part for line in re.findall(r"^    (.+)$", README, re.MULTILINE)
                                             for part in re.split("&&|;", line)]
LINES = [line.strip() for line in SPANS if re.match(r"\s*(\S*/)?mesp-np ", line)]


def test_python_block():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


@pytest.mark.parametrize("line", sorted(set(LINES)))
def test_command_lines_parse(line, monkeypatch):
    """With COMMAND standing for each of them."""
    for command in COMMANDS:
        monkeypatch.setattr(f"mesp_np.cli.{command}.run", lambda args: 0)
    for name in COMMANDS if "COMMAND" in line else [""]:
        try:
            code = main(shlex.split(line.replace("COMMAND", name))[1:])
        except SystemExit as exit:                       # --help, and bad usage
            code = exit.code
        assert code == 0


def test_flags_exist(capsys):
    """Every --flag in a table or a sentence is a flag of some command; a tool's may also stand in its own file."""
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
    known = set(re.findall(FLAG, capsys.readouterr().out))
    for span in SPANS:
        tool = re.search(r"python (tools/\S+\.py)", span)
        own = set(re.findall(FLAG, (ROOT / tool[1]).read_text(encoding="utf-8"))) if tool else set()
        assert set(re.findall(FLAG, span)) <= known | own, span


def test_it_speaks_of_every_command_and_is_finished():
    assert {shlex.split(line)[1] for line in LINES} >= set(COMMANDS)
    assert "@@" not in README
