"""What is said about the data: every count, one row with its learned part, and a warning when endings disagree."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from mesp_np.checkpoint import chat_template
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.data import report, rows
from mesp_np.data.batches import Batches
from mesp_np.data.encode import Encoder
from mesp_np.errors import UserError
from tests import small, templates, tiny_tokenizer
from tests.tiny_tokenizer import EOS, IM_END


@pytest.fixture
def folder(tmp_path):
    """Make a Checkpoint's part that matters here; the arguments are eos_token_id of the two files."""
    def make(generation, config, eos="<|endoftext|>"):
        tiny_tokenizer.write(tmp_path, chat_template=tiny_tokenizer.CHATML, eos_token=eos)
        for name, ids in (("generation_config.json", generation), ("config.json", config)):
            if ids is not None:
                (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
        ids = generation if generation is not None else config
        return SimpleNamespace(folder=tmp_path, tokenizer=Tokenizer(tmp_path, 259),
                               eos_ids=frozenset(ids if isinstance(ids, list) else [ids]))
    return make


def endings(checkpoint, has_conversations):
    encoder = Encoder(checkpoint.tokenizer, chat_template.find(checkpoint.folder))
    return list(report.endings(checkpoint, encoder, has_conversations))


def test_files_that_agree_are_silent(folder):
    assert endings(folder([IM_END, EOS], IM_END, "<|im_end|>"), True) == []
    assert endings(folder(None, EOS), False) == []


def test_conversations_of_a_base_model_are_warned_of(folder):
    """Generation stops at <|endoftext|> only, conversations end their turns with <|im_end|>."""
    assert endings(folder(EOS, EOS), False) == []
    note, = endings(folder(EOS, EOS), True)
    assert "end a turn with <|im_end|>, but generation stops at <|endoftext|>" in note


def test_a_template_without_an_end_of_turn_is_not_warned_of(folder):
    """The last control token of Alpaca's form stands at its beginning."""
    checkpoint = folder(EOS, EOS)
    tiny_tokenizer.write(checkpoint.folder, chat_template=templates.ALPACA, bos_token="<|im_start|>")
    assert endings(checkpoint, True) == []


def test_an_end_of_text_that_is_no_number_is_refused(folder):
    checkpoint = folder(EOS, EOS)
    (checkpoint.folder / "config.json").write_text('{"eos_token_id": ["<|im_end|>"]}')
    with pytest.raises(UserError, match="config.json: eos_token_id is "):
        endings(checkpoint, False)


def test_files_that_disagree_are_all_named(folder):
    note, _ = endings(folder(EOS, EOS, "<|im_end|>"), True)
    assert ("tokenizer_config.json says <|im_end|>, generation_config.json <|endoftext|>, config.json <|endoftext|>; "
            "<|im_end|> is appended") in note
    assert len(endings(folder([EOS, IM_END], EOS, "<|im_end|>"), False)) == 1


def test_an_example_shows_what_is_learned_in_brackets(folder):
    tokenizer = folder(EOS, EOS).tokenizer
    ids = np.array([tiny_tokenizer.IM_START, *tokenizer.encode("Hi naïve"), IM_END], np.int32)
    labels = np.where(np.arange(len(ids) - 1) >= 3, ids[1:], -100)
    text = report.example(rows.Row(ids[:-1], labels), tokenizer)
    assert text.plain == "<|im_start|>Hi [[naïve<|im_end|>]]"
    assert [text.plain[span.start:span.end] for span in text.spans if span.style == report.LEARNED] == [
        "[[naïve<|im_end|>]]"]
    labels[-1] = -100
    assert report.example(rows.Row(ids[:-1], labels), tokenizer).plain == "<|im_start|>Hi [[naïve]]"


def test_a_long_example_shows_the_learned_part(folder):
    tokenizer = folder(EOS, EOS).tokenizer
    ids = np.array(tokenizer.encode("x" * 999 + "yes" + "z" * 999), np.int32)
    labels = np.where((ids[1:] == tokenizer.encode("z")[0]) | (np.arange(2000) < 998), -100, ids[1:])
    text = report.example(rows.Row(ids[:-1], labels), tokenizer).plain
    assert "x[[yes]]z" in text and text.startswith("...x") and text.endswith("z...") and len(text) < 400


def test_every_count_is_said(tmp_path):
    source = rows.Source("data.jsonl", truncated=7)
    source.forms.update(messages=1200, text=3)
    for line in range(1, 6):
        source.skip("no token to train", f"data.jsonl:{line}")
        source.bad.add(f"data.jsonl:{line}0: is no JSON object")
    source.unasked.add("data.jsonl:9")
    made = small.rows([([1, 2], [2, -100])] * 4)
    train = rows.Rows(made.data, made.starts, made.lengths, made.targets, source)
    lines = list(report.describe(train, train.part(np.arange(1)), 64))
    assert lines[0] == "train: 4 rows, 8 tokens, 4 with a target"
    assert lines[1] == "  data.jsonl: 1,200 messages, 3 text; 7 cut at 64"
    assert lines[2] == "  5 skipped, no token to train: data.jsonl:1, data.jsonl:2, data.jsonl:3, and 2 more"
    assert lines[3].startswith("  5 bad rows skipped: data.jsonl:10: is no JSON object, ")
    assert lines[4] == "  1 conversations begin with an answer, which is not learned: data.jsonl:9"
    assert lines[5:] == ["valid: 1 rows, 2 tokens, 1 with a target"]


def test_padding_and_packing_are_said():
    made = small.rows([([1] * 8, [1] * 8)] * 4)
    assert report.fill(Batches(made, 2, 16)) == ("2 batches an epoch: 32 of 64 positions hold a token, 50.0% padding")
    assert report.fill(Batches(made, 2, 16, packing=True)) == (
        "1 batches an epoch, 4 rows packed into 2: 32 of 32 positions hold a token, 0.0% padding")
