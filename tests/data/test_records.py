"""Files as users have them: the accepted dirt, and every refusal with file, line and reason."""

import codecs
import json

import pytest

from mesp_np.data import records
from mesp_np.errors import UserError


def rows(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    return [record.content for record in records.read(path)]


@pytest.mark.parametrize("content, expected", [
    (b'{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
    (b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
    (codecs.BOM_UTF8 + b'{"text": "a"}\n', ["a"]),
    (b'{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
    (b'\n{"text": "a"}\n\n  \r\n{"text": "b"}\n\n', ["a", "b"]),
    (b'{"text": ""}\n', [""]),
    (b'{"text": "a", "id": 3, "meta": {"x": null}}\n', ["a"]),
    ('{"text": "a\u2028b\u2029c\x85d"}\n{"text": "\\u2028"}\n'.encode(), ["a\u2028b\u2029c\x85d", "\u2028"]),
    (b'{"text": "\\ud83c\\udfad\\n\\t"}\n', ["\U0001f3ad\n\t"]),
])
def test_accepted_rows(tmp_path, content, expected):
    assert rows(tmp_path, content) == expected


def test_a_long_line(tmp_path):
    text = "x" * 50_000_000
    assert rows(tmp_path, json.dumps({"text": text}).encode()) == [text]


GOOD = b'{"text": "a"}\n\n'


@pytest.mark.parametrize("line, words", [
    (b'[{"text": "a"}, {"text": "b"}]', "a JSON array"),
    (b"[", "a JSON array"),
    (b'{"text": "a"} {"text": "b"}', "more than one JSON value"),
    (b'{"text": null}', '"text" is null, not a string'),
    (b'{"text": 3}', '"text" is 3, not a string'),
    (b'{"text": NaN}', '"text" is NaN, not a string'),
    (b'{"text": ["a"]}', 'not a string'),
    (b'{"text": "a", "text": "b"}', "a key stands twice among text, text"),
    (b'{"text": "a\tb"}', "Invalid control character at, column 12"),
    (b'{"text": "a', "Unterminated string"),
    (b'{"text": "\xff"}', "not UTF-8 .byte 0xff at 10"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b'{"messages": []}', 'has no "text", only messages'),
    (b"{}", 'has no "text", only nothing'),
    (b'"a"', "no JSON object"),
    (b"a", "not one JSON object"),
    (b'{"a":' * 100_000, "cannot be read as JSON"),
])
def test_refused_rows(tmp_path, line, words):
    with pytest.raises(UserError, match=words) as raised:
        rows(tmp_path, GOOD + line + b"\n" + GOOD)
    assert "data.jsonl:3: " in str(raised.value)


def test_utf16(tmp_path):
    with pytest.raises(UserError, match="data.jsonl:1: not UTF-8"):
        rows(tmp_path, '{"text": "a"}\n'.encode("utf-16"))


@pytest.mark.parametrize("content", [b"", b"\n\n", codecs.BOM_UTF8, b"  \r\n"])
def test_empty_files(tmp_path, content):
    for name in ("data.jsonl", "data.txt"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: is empty"):
            records.read(tmp_path / name)


def test_text_file(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(codecs.BOM_UTF8 + b"one\r\ntwo\n\nthree")
    assert records.read(path) == [records.Record("document", "one\ntwo\n\nthree", str(path))]
    path.write_bytes(b"one \xe9")
    with pytest.raises(UserError, match="book.txt: not UTF-8 .byte 0xe9 at 4"):
        records.read(path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(UserError, match="none.txt: cannot be read .No such file"):
        records.read(tmp_path / "none.txt")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="folder.jsonl: cannot be read .Is a directory"):
        records.read(tmp_path / "folder.jsonl")
    with pytest.raises(UserError, match="data.csv: is neither .txt nor .jsonl"):
        records.read(tmp_path / "data.csv")


def test_folders(tmp_path):
    with pytest.raises(UserError, match="holds neither train.jsonl nor train.txt"):
        records.find(tmp_path)
    train, valid = tmp_path / "train.txt", tmp_path / "valid.jsonl"
    train.touch()
    assert records.find(tmp_path) == (train, None)
    valid.touch()
    assert records.find(tmp_path) == (train, valid)
    assert records.find(train) == (train, None)
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(UserError, match="holds both train.jsonl and train.txt"):
        records.find(tmp_path)
