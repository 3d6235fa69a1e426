"""Documents of any length: encoded and written a part at a time, to the windows of the whole."""

import tracemalloc

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.data import rows
from mesp_np.data.encode import Encoder
from mesp_np.errors import UserError
from tests import tiny_tokenizer
from tests.tiny_tokenizer import EOS


def byte_level(tokenizer):
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)


@pytest.fixture
def encoder(tmp_path):
    """Make an Encoder for texts, with a tokenizer that `change` alters."""
    def make(change=byte_level):
        return Encoder(Tokenizer(tiny_tokenizer.write(tmp_path / "tokenizer", change), tiny_tokenizer.VOCAB_SIZE), None)
    return make


def windows(tokens, seq):
    """(ids, labels) of a whole text."""
    return [(tokens[at:at + seq][:len(tokens) - at - 1], tokens[at + 1:at + seq + 1])
            for at in range(0, len(tokens) - 1, seq)]


@pytest.mark.parametrize("piece, block, seq", [(1, 1, 8), (7, 5, 3), (100, 30, 50), (50, 1000, 1), (1000, 1, 999),
                                               (1 << 20, 1 << 18, 8)])
@pytest.mark.parametrize("change", [byte_level, lambda tokenizer: None], ids=["cut", "whole"])
def test_a_document_has_the_windows_of_the_whole(tmp_path, monkeypatch, encoder, piece, block, seq, change):
    """Whatever the sizes of pieces and blocks, of a tokenizer that must see it whole too."""
    text, path = "It is naïve.\r\n 漢字 and 1, 2\n\n\tno <|endoftext|> yet\n🎭" * 9, tmp_path / "x.txt"
    path.write_bytes((text + "<|endoftext|>").encode())
    expected = windows([*encoder(change).tokenizer.encode(text.replace("\r\n", "\n")), EOS], seq)
    monkeypatch.setattr("mesp_np.data.files.PIECE", piece)
    monkeypatch.setattr("mesp_np.checkpoint.tokenizer.BLOCK", block)
    made = rows.load_file(path, encoder(change), seq)
    assert [(row.ids.tolist(), row.labels.tolist()) for row in map(made.row, range(len(made)))] == expected
    assert made.source.written.count == 1 and made.source.forms == {"document": 1}


def test_a_document_is_never_all_in_memory(tmp_path, monkeypatch, encoder):
    """Nor are its tokens: Python holds a few pieces and blocks, where all of them take over 200 bytes a token."""
    monkeypatch.setattr("mesp_np.data.files.PIECE", 1 << 12)
    monkeypatch.setattr("mesp_np.checkpoint.tokenizer.BLOCK", 1 << 12)
    for_texts = encoder()
    (tmp_path / "x.txt").write_text("a line of text\n" * 10_000)
    tracemalloc.start()
    made = rows.load_file(tmp_path / "x.txt", for_texts, 64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made.tokens == 150_000 and peak < 1_000_000


def test_a_document_that_cannot_be_read_to_its_end(tmp_path, monkeypatch, encoder):
    monkeypatch.setattr("mesp_np.data.files.PIECE", 4)
    (tmp_path / "x.txt").write_bytes(b"good so far \xe9")
    for allowed in (0, 5):
        with pytest.raises(UserError, match="x.txt: not UTF-8 .byte 0xe9 at 12"):
            rows.load_file(tmp_path / "x.txt", encoder(), 4, allowed)
