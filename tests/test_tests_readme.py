"""tests/README.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent


def missing(text):
    """The tests that a text names as `file.py::test` and that are not there."""
    return [name for name, file, test in re.findall(r"`(([\w/]+\.py)::(\w+))`", text)
            if not (TESTS / file).exists() or f"def {test}(" not in (TESTS / file).read_text()]


def test_every_test_that_is_named_exists():
    text = (TESTS / "README.md").read_text()
    assert text.count("::") > 50 and missing(text) == []


def test_a_test_that_is_not_there_is_seen():
    assert missing("`test_bits.py::test_methods_agree`, `test_bits.py::test_gone`, `gone.py::test_x`") == [
        "test_bits.py::test_gone", "gone.py::test_x"]
