"""Targets by hand: what is predicted from where, what is cut, what is skipped."""

import numpy as np
import pytest

from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.data import rows
from mesp_np.data.records import Record
from mesp_np.errors import UserError
from tests import tiny_tokenizer

EOS = tiny_tokenizer.EOS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer")), tiny_tokenizer.VOCAB_SIZE)


def made(tokenizer, kind, *texts, seq=8, eos=True):
    return rows.make([Record(kind, text, f"x:{line}") for line, text in enumerate(texts, 1)], tokenizer, seq, eos)


def pairs(made):
    return [(row.ids.tolist(), row.labels.tolist()) for row in made.items]


def test_text_row(tokenizer):
    a, b, c = tokenizer.encode("abc")
    assert pairs(made(tokenizer, "text", "abc")) == [([a, b, c], [b, c, EOS])]
    assert pairs(made(tokenizer, "text", "abc", eos=False)) == [([a, b], [b, c])]


def test_cut_rows_have_no_end_of_text(tokenizer):
    ids = tokenizer.encode("abcdefghijkl")
    for length, targets, truncated in ((7, ids[1:7] + [EOS], 0), (8, ids[1:8] + [EOS], 0),
                                       (9, ids[1:9], 1), (12, ids[1:9], 1)):
        result = made(tokenizer, "text", "abcdefghijkl"[:length])
        assert pairs(result)[0][1] == targets and result.truncated == truncated


def test_document_windows_predict_every_token_once(tokenizer):
    text = "the quick brown fox"
    tokens = tokenizer.encode(text) + [EOS]
    for seq in (1, 3, 4, 8, 19, 20, 100):
        result = made(tokenizer, "document", text, seq=seq)
        assert sum((labels for _, labels in pairs(result)), []) == tokens[1:]
        assert sum((ids for ids, _ in pairs(result)), []) == tokens[:-1]
        assert all(len(row.ids) == seq for row in result.items[:-1]) and result.truncated == 0
    assert made(tokenizer, "document", text, eos=False).trained_tokens == len(tokens) - 2


def test_rows_without_a_target_are_counted(tokenizer):
    result = made(tokenizer, "text", "", "a", "ab", eos=False)
    assert len(result.items) == 1 and result.skipped == {"fewer than two tokens": ["x:1", "x:2"]}
    result = made(tokenizer, "text", "", "a")
    assert len(result.items) == 1 and result.skipped == {"fewer than two tokens": ["x:1"]}
    assert pairs(result)[0][1] == [EOS]
    for kind in ("text", "document"):
        with pytest.raises(UserError, match="no row can be trained .fewer than two tokens: x:1"):
            made(tokenizer, kind, "")


def test_masks_belong_to_targets(tokenizer, monkeypatch):
    """Tokens 10 11 12 13 with mask 0 0 1 0: only position 1, which predicts 12, has a target."""
    records = {"one": ([10, 11, 12, 13], [0, 0, 1, 0]), "none": ([10, 11], [1, 0]),
               "cut": ([10] * 9 + [11, 12], [0] * 9 + [1, 1])}
    monkeypatch.setitem(rows.ENCODE, "chat", lambda content, tokenizer, eos: records[content])
    result = made(tokenizer, "chat", "one", "none", "cut")
    assert pairs(result) == [([10, 11, 12], [-100, 12, -100])]
    assert result.skipped == {"no token to train": ["x:2", "x:3"]} and result.truncated == 1
    assert (result.tokens, result.trained_tokens) == (3, 1)


def test_end_of_text_in_the_middle_is_trained(tokenizer, monkeypatch):
    monkeypatch.setitem(rows.ENCODE, "chat", lambda *_: ([5, EOS, 6, EOS], [True] * 4))
    assert pairs(made(tokenizer, "chat", "")) == [([5, EOS, 6], [EOS, 6, EOS])]


@pytest.mark.parametrize("count, held", [(1, 0), (2, 1), (19, 1), (20, 1), (60, 3), (287, 14)])
def test_hold_out(count, held):
    items = [rows.Row(np.array([i], np.int32), np.array([i], np.int32)) for i in range(count)]
    train, valid = rows.hold_out(rows.Rows(items), seed=3)
    again, _ = rows.hold_out(rows.Rows(items), seed=3)
    assert len(valid.items) == held and again.items == train.items
    found = [int(row.ids[0]) for row in train.items + valid.items]
    assert sorted(found) == list(range(count))
    if held > 2:
        assert rows.hold_out(rows.Rows(items), seed=4)[1].items != valid.items


def test_load(tmp_path, tokenizer):
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 40)
    train, valid = rows.load(tmp_path, tokenizer, seq=8)
    assert (len(train.items), len(valid.items)) == (38, 2)
    (tmp_path / "valid.jsonl").write_text('{"text": "abcd"}\n')
    train, valid = rows.load(tmp_path, tokenizer, seq=8, eos=False)
    assert (len(train.items), len(valid.items), valid.tokens) == (40, 1, 3)
    (tmp_path / "valid.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="no row can be trained .*valid.jsonl:1"):
        rows.load(tmp_path, tokenizer, seq=8)
