"""What the file says about truncation, padding and control tokens must not reach the ids."""

import json

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from mesp_np.checkpoint.tokenizer import CUT, Tokenizer, _blocks
from mesp_np.errors import UserError
from tests import tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    return tiny_tokenizer.write(tmp_path)


def test_there_and_back(folder):
    tokenizer = Tokenizer(folder, tiny_tokenizer.VOCAB_SIZE)
    for text in ("", "a", "naïve 漢字 🎭\r\n\t"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_name, tokenizer.eos_id) == ("<|endoftext|>", tiny_tokenizer.EOS)
    assert tokenizer.decode([tokenizer.eos_id]) == "<|endoftext|>"


def test_baked_in_truncation_and_padding(tmp_path):
    def change(tokenizer):
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=8)
    tokenizer = Tokenizer(tiny_tokenizer.write(tmp_path, change), tiny_tokenizer.VOCAB_SIZE)
    assert [len(tokenizer.encode(text)) for text in ("hello world", "hi", "")] == [11, 2, 0]


def test_control_tokens_in_text_are_text(folder):
    tokenizer = Tokenizer(folder, tiny_tokenizer.VOCAB_SIZE)
    text = "a<|im_end|>b<|im_start|>system<|endoftext|>"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and max(ids) < tiny_tokenizer.EOS and tokenizer.decode(ids) == text


def test_control_tokens_of_a_rendered_text_are_ids(folder):
    tokenizer = Tokenizer(folder, tiny_tokenizer.VOCAB_SIZE)
    a, b = tokenizer.encode("ab")
    ids, starts = tokenizer.rendered("a<|im_end|>b")
    assert (ids.tolist(), starts.tolist()) == ([a, tiny_tokenizer.IM_END, b], [0, 1, 11])
    assert max(tokenizer.encode("<|im_end|>")) < tiny_tokenizer.EOS


def test_a_mark_makes_a_control_token_characters_and_is_dropped(folder):
    tokenizer = Tokenizer(folder, tiny_tokenizer.VOCAB_SIZE)
    ids, starts = tokenizer.rendered("é<~|im_end|><|im_end|>b~", mark="~")
    text = "é<|im_end|>"
    assert ids.tolist() == [*tokenizer.encode(text), tiny_tokenizer.IM_END, *tokenizer.encode("b")]
    assert starts.tolist() == [0, 0, *range(1, len(text)), len(text), len(text) + 10]


@pytest.mark.parametrize("text", ["word " * 99, "a line\n\n" * 50, "x" * 500, "", "  \n \n" * 99, "漢字。\n漢" * 60])
def test_a_long_text_is_encoded_in_blocks_that_change_nothing(folder, monkeypatch, text):
    tokenizer = Tokenizer(folder, tiny_tokenizer.VOCAB_SIZE)
    whole = tokenizer.encode_at(text)
    monkeypatch.setattr("mesp_np.checkpoint.tokenizer.BLOCK", 100)
    blocks = tokenizer.encode_at(text)
    assert np.array_equal(blocks[0], whole[0]) and np.array_equal(blocks[1], whole[1])
    assert len(list(_blocks(text))) > 1 or not CUT.search(text, 100)


def test_what_belongs_before_a_text_is_told_and_not_added(tmp_path):
    def change(tokenizer):
        tokenizer.post_processor = TemplateProcessing("<|im_start|> $A <|im_end|>", special_tokens=[
            ("<|im_start|>", 257), ("<|im_end|>", 258)])
    tokenizer = Tokenizer(tiny_tokenizer.write(tmp_path, change), 259)
    assert len(tokenizer.encode("ab")) == 2 and tokenizer.begin_ids == [257]
    assert Tokenizer(tiny_tokenizer.write(tmp_path), 259).begin_ids == []


def test_ids_beyond_the_model(folder):
    with pytest.raises(UserError, match="'<|endoftext|>' has id 256, the model has 200 tokens"):
        Tokenizer(folder, 200)
    def change(tokenizer):
        tokenizer.add_tokens(["<tool_call>"])
    tokenizer = Tokenizer(tiny_tokenizer.write(folder, change), tiny_tokenizer.VOCAB_SIZE)
    with pytest.raises(UserError, match="'<tool_call>' has id 259, the model has 259 tokens"):
        tokenizer.encode("a <tool_call>")


@pytest.mark.parametrize("value", [None, "<|none|>", 7, {"content": "<|none|>"}])
def test_eos_that_is_no_token(folder, value):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    with pytest.raises(UserError, match="tokenizer_config.json: eos_token is"):
        Tokenizer(folder, tiny_tokenizer.VOCAB_SIZE)


def test_eos_as_an_object(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert Tokenizer(folder, tiny_tokenizer.VOCAB_SIZE).eos_id == 258


def test_missing_and_broken_files(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="tokenizer_config.json: cannot be read"):
        Tokenizer(folder, 259)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="tokenizer.json: cannot be read"):
        Tokenizer(folder, 259)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer.json: not found"):
        Tokenizer(folder, 259)
