"""What a shell and a system do to a command: odd streams, odd text, names no file can have, Ctrl-C at any time."""

import io
import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module
from pathlib import Path

import pytest

from mesp_np.cli import main
from mesp_np.cli.texts import utf8
from mesp_np.errors import UsageError
from tests import tiny_tokenizer

TOO_LONG = "x" * 300
FULL = Path("/dev/full")


def refusal(capsys, *argv, code=1):
    """The one line with which a command ends."""
    assert main([str(word) for word in argv]) == code
    line, = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def chat_model(model, tmp_path):
    """The tiny model, with a chat template."""
    path = tiny_tokenizer.write(tmp_path / "chat", chat_template=tiny_tokenizer.CHATML)
    for name in ("config.json", "model.safetensors"):
        (path / name).write_bytes(Path(model, name).read_bytes())
    return str(path)


@pytest.mark.parametrize("argv", [
    ["plan", "--model", TOO_LONG], ["plan", "--adapter", TOO_LONG], ["eval", "--data", TOO_LONG],
    ["train", "--data", TOO_LONG], ["train", "--run-dir", TOO_LONG, "--iters", "1", "--prompt", ""],
    ["merge", "--adapter", "x", "--out", TOO_LONG], ["quantize", "x", TOO_LONG]], ids=" ".join)
def test_a_name_that_the_system_refuses(argv, model, capsys):
    line = refusal(capsys, *argv)
    assert line.startswith(f"mesp-np {argv[0]}: {TOO_LONG}") and "File name too long" in line


@pytest.mark.skipif(not FULL.exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("argv", [["plan", "--model", "tiny"], ["plan", "--model", "tiny", "--json"],
                                  ["generate", "--prompt", "x", "--max-tokens", "1"]], ids=" ".join)
def test_an_output_that_is_full(argv, capsys, monkeypatch):
    with open(FULL, "w") as full:                   # its end would raise if what it did not take were tried again
        monkeypatch.setattr("sys.stdout", full)
        assert "No space left on device" in refusal(capsys, *argv)


def test_streams_that_are_closed(model, chat_model, monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", None)
    assert main(["generate", "--model", model, "--prompt", "x", "--max-tokens", "1"]) == 0
    assert main(["generate", "--model", chat_model, "--chat"]) == 0
    assert main(["plan", "--model", "nowhere"]) == 1


@pytest.mark.parametrize("argv", [["generate", "--prompt"], ["generate", "--chat", "--prompt", "x", "--system"],
                                  ["train", "--prompt"]], ids=" ".join)
def test_flags_that_are_not_utf8(argv, capsys):
    assert f"{argv[-1][2:]} 'a\\udcff': not UTF-8" in refusal(capsys, *argv, "a\udcff", code=2)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_lines_that_are_not_utf8(encoding, chat_model, monkeypatch, capsys):
    """As in a UTF-8 locale, and in the C locale, which reads UTF-8 all the same."""
    def say(line):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line), encoding))
        return ["generate", "--model", chat_model, "--chat", "--max-tokens", "1"]

    assert "the turn 'a\\udcff': not UTF-8" in refusal(capsys, *say(b"a\xff\n"), code=2)
    assert main(say("\u00e9\n".encode())) == 0


def test_text_is_utf8_in_any_locale():
    assert utf8("prompt", "caf\u00e9") == utf8("prompt", "caf\udcc3\udca9") == "caf\u00e9"
    for text in ("caf\udce9", "\ud800"):
        with pytest.raises(UsageError, match="prompt .*: not UTF-8"):
            utf8("prompt", text)


@pytest.mark.parametrize("argv", [
    ["plan", "--model", ""], ["plan", "--adapter", ""], ["train", "--data", ""], ["train", "--run-dir", ""],
    ["compare", "--methods", ""], ["quantize", "x", ""]], ids=" ".join)
def test_an_empty_name_is_not_as_good_as_none(argv, capsys):
    name = argv[-2].lstrip("-") if argv[0] != "quantize" else "out"
    assert f"{name} is empty" in refusal(capsys, *argv, code=2)


INTERRUPTED_IMPORT = """
import sys, runpy
class Interrupt:
    def find_spec(self, name, *_):
        if name == "numpy":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["plan"]
"""
START = ["runpy.run_module('mesp_np', run_name='__main__')", "from mesp_np.__main__ import main; sys.exit(main())"]


@pytest.mark.parametrize("start", START)
def test_ctrl_c_during_the_imports(start):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT + start], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "mesp-np: interrupted\n")


def test_the_console_script_is_the_module():
    setup = ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    module, name = setup["options.entry_points"]["console_scripts"].split("=")[1].strip().split(":")
    assert callable(getattr(import_module(module), name)) and module == "mesp_np.__main__"
