"""What the file says about truncation, padding and control tokens must not reach the ids."""

import json

import pytest

from mesp_np.checkpoint.tokenizer import Tokenizer
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


def test_nothing_is_added_around_a_text(tmp_path):
    from tokenizers.processors import TemplateProcessing
    def change(tokenizer):
        tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 257)])
    assert len(Tokenizer(tiny_tokenizer.write(tmp_path, change), 259).encode("ab")) == 2


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
