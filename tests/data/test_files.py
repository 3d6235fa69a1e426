"""Files: what is found in a folder, and that a file is read a part at a time, whatever its size and its dirt."""

import codecs
import itertools
import tracemalloc

import pytest

from mesp_np.data import files, records
from mesp_np.errors import UserError


def document(path):
    """The text of a file that is one document."""
    (where, pieces), = files.contents(path)
    assert where == str(path)
    return "".join(pieces)


@pytest.fixture
def write(tmp_path):
    def make(content, name="book.txt"):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name
    return make


def test_a_text_file_is_one_document(write):
    assert document(write(codecs.BOM_UTF8 + b"one\r\ntwo\n\nthree\r")) == "one\ntwo\n\nthree\r"
    for blank in (b"", b" \n", codecs.BOM_UTF8, b"\r\n\r\n", "\u3000".encode()):
        assert list(files.contents(write(blank))) == []


DIRT = ["\ufeff", "a", "\r", "\n", "\r\n", "\u00fc", "\u6f22", "\U0001f3ad"]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_where_a_piece_ends_changes_nothing(write, monkeypatch, size):
    """Characters of two to four bytes, CRLF and the byte-order mark, all cut everywhere."""
    monkeypatch.setattr(files, "PIECE", size)
    for parts in itertools.product(DIRT, repeat=3):
        content = "".join(parts) + "z"
        expected = content.removeprefix("\ufeff").replace("\r\n", "\n")
        assert document(write(content.encode())) == expected


@pytest.mark.parametrize("content, byte, at", [(b"one \xe9", "e9", 4), (b"abcde\xff\n", "ff", 5), (b"ab\xc3", "c3", 2),
                                               (codecs.BOM_UTF8 + b"a\xc3(", "c3", 4), (b"abc\xe6\xbc", "e6", 3)])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_what_is_not_utf8_is_named_by_its_place_in_the_file(write, monkeypatch, content, byte, at, size):
    monkeypatch.setattr(files, "PIECE", size)
    with pytest.raises(records.BadRow, match=f"book.txt: not UTF-8 .byte 0x{byte} at {at}"):
        document(write(content))


def test_a_document_is_read_piece_by_piece(write):
    path = write(b"a line of text\r\n" * 1_000_000)
    tracemalloc.start()
    (_, pieces), = files.contents(path)
    count = sum(map(len, pieces))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 15_000_000 and peak < 5 * files.PIECE < path.stat().st_size


def test_a_file_of_rows_is_read_line_by_line(write):
    path = write((b'{"text": "' + b"x" * 10_000 + b'"}\n') * 1000, "data.jsonl")
    tracemalloc.start()
    count = sum(len("".join(records.parse(*row).pieces)) for row in files.contents(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 10_000_000 and peak < 500_000


def test_files_that_are_none(tmp_path):
    for name in ("folder.jsonl", "folder.txt"):
        (tmp_path / name).mkdir()
    for name, words in (("none.txt", "cannot be read .No such file"), ("folder.jsonl", "cannot be read .Is a direct"),
                        ("folder.txt", "cannot be read .Is a direct"), ("data.csv", "is neither .txt nor .jsonl")):
        with pytest.raises(UserError, match=f"{name}: {words}"):
            list(files.contents(tmp_path / name))


def test_a_file_that_goes_away_while_it_is_read(write):
    path = write(b"text")
    (_, pieces), = files.contents(path)
    path.unlink()
    with pytest.raises(UserError, match="book.txt: cannot be read .No such file"):
        list(pieces)


def test_names_in_capitals(write, tmp_path):
    assert document(write(b"text", "BOOK.TXT")) == "text"
    (where, row), = files.contents(write(b'{"text": "a"}', "DATA.JSONL"))
    assert where.endswith("DATA.JSONL:1") and records.parse(where, row).form == "text"
    assert files.find(tmp_path, "BOOK").name == "BOOK.TXT" and files.find(tmp_path, "DATA").name == "DATA.JSONL"


def test_folders(tmp_path):
    with pytest.raises(UserError, match="holds neither train.jsonl nor train.txt"):
        files.find(tmp_path)
    train, valid = tmp_path / "train.txt", tmp_path / "valid.jsonl"
    for path in (train, tmp_path / "train.old.jsonl", tmp_path / "train.csv"):
        path.touch()
    assert files.find(tmp_path) == train and files.find(tmp_path, "valid") is None
    valid.touch()
    assert files.find(tmp_path, "valid") == valid and files.find(tmp_path, "test") is None
    assert files.find(train) == train and files.find(train, "valid") is None
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(UserError, match="holds both train.jsonl and train.txt"):
        files.find(tmp_path)
