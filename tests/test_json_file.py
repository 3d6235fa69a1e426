"""The small JSON files: what is none is one clear line."""

import pytest

from mesp_np.errors import UserError
from mesp_np.json_file import read_object, write_object


@pytest.mark.parametrize("content, words", [
    (b"[" * 100_000, "is not JSON"), (b'{"a":' * 100_000, "is not JSON"), (b"\xff", "is not JSON"),
    (b'{"a": 1', "is not JSON"), (b"[]", "holds no JSON object")], ids=["lists", "objects", "bytes", "cut", "list"])
def test_what_is_no_object(tmp_path, content, words):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=f"config.json: {words}"):
        read_object(tmp_path / "config.json")


def test_what_is_written_is_what_is_read(tmp_path):
    write_object(tmp_path / "a.json", {"b": [1, None], "a": "\u00e9"})
    assert read_object(tmp_path / "a.json") == {"a": "\u00e9", "b": [1, None]}
