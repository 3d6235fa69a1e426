"""What the file says about truncation, padding and control tokens must not reach the ids."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.processors import TemplateProcessing

from mesp_np.checkpoint.tokenizer import CUT, SpelledControl, Tokenizer
from mesp_np.errors import UserError
from tests import tiny_sentencepiece, tiny_tokenizer


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
    ids, starts = tokenizer.rendered("é<~|im_end|><|im_end|>b", mark="~")
    text = "é<|im_end|>"
    assert ids.tolist() == [*tokenizer.encode(text), tiny_tokenizer.IM_END, *tokenizer.encode("b")]
    assert starts.tolist() == [0, 0, 1, *range(3, len(text) + 1), len(text) + 1, len(text) + 11]


def byte_level(tokenizer):
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)


def as_qwen(tokenizer):
    pattern = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
               r"|\s+(?!\S)|\s+")
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


def blocks_of_100(tokenizer, text, monkeypatch):
    monkeypatch.setattr("mesp_np.checkpoint.tokenizer.BLOCK", 100)
    return list(tokenizer.blocks([text]))


@pytest.mark.parametrize("change", [byte_level, as_qwen])
@pytest.mark.parametrize("text", ["word " * 99, "a line\n\n" * 50, "x" * 500, "", "  \n \n" * 99, "漢字。\n漢" * 60,
                                  "don't\n1 + 22 = _x\n" * 30, "e\u0301 \u0301\n\u0301!\n_" * 40])
def test_a_long_text_is_encoded_in_blocks_that_change_nothing(tmp_path, monkeypatch, text, change):
    tokenizer = Tokenizer(tiny_tokenizer.write(tmp_path, change), tiny_tokenizer.VOCAB_SIZE)
    whole, words = tokenizer.encode_at(text), tokenizer._words(text)
    blocks = blocks_of_100(tokenizer, text, monkeypatch)
    assert "".join(blocks) == text and sum(map(tokenizer._words, blocks), []) == words
    cut = tokenizer.encode_at(text)
    assert np.array_equal(cut[0], whole[0]) and np.array_equal(cut[1], whole[1])
    assert len(blocks) > 1 or not CUT.search(text, 100)
    monkeypatch.setattr("mesp_np.checkpoint.tokenizer.BLOCK", 7)
    for size in (1, 2, 3, 50):
        pieces = [text[at:at + size] for at in range(0, len(text), size)]
        assert list(tokenizer.blocks(pieces)) == list(tokenizer.blocks([text]))


def added(*names, **options):
    """A change that makes a byte-level tokenizer with more tokens."""
    def change(tokenizer):
        byte_level(tokenizer)
        tokenizer.add_tokens([AddedToken(name, **options) for name in names])
    return change


def space_before(tokenizer):
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)


@pytest.mark.parametrize("change, is_cut", [
    (byte_level, True), (lambda tokenizer: None, False), (space_before, False), (added("<|end|>", rstrip=True), False),
    (added("<|end|>"), True), (added("  ", "\t\t", " word", "\n\n"), True),
    (added("two words"), False), (added("a "), False), (added("\nword"), False), (added("a\nb"), False)])
def test_only_what_does_not_look_beyond_a_cut_is_given_parts_of_a_text(tmp_path, monkeypatch, change, is_cut):
    tokenizer = Tokenizer(tiny_tokenizer.write(tmp_path, change), 300)
    assert (len(blocks_of_100(tokenizer, "word\n" * 99, monkeypatch)) > 1) == is_cut


def sentencepiece(folder, kind, **options):
    return Tokenizer(tiny_sentencepiece.write(folder, kind, **options), tiny_sentencepiece.VOCAB_SIZE)


@pytest.mark.parametrize("kind", tiny_sentencepiece.KINDS)
def test_sentencepiece_is_given_the_whole_text(tmp_path, monkeypatch, kind):
    tokenizer, text = sentencepiece(tmp_path, kind), "an a\nb " * 50
    whole = tokenizer._inner.encode(text, add_special_tokens=False).ids
    assert len(blocks_of_100(tokenizer, text, monkeypatch)) == 1 and tokenizer.encode(text) == whole


@pytest.mark.parametrize("kind", ["first", "always", "never", "prepended"])
def test_a_mark_changes_nothing_around_it(tmp_path, kind):
    """The tokens of a conversation that spells </s> are those of one with @@@@ there, but for these four."""
    tokenizer = sentencepiece(tmp_path, kind)
    text = "<s>[INST] an a\nb @@@@ a [/INST] yes @@@@\n </s>\n<s>@@@@ a</s>"
    spelled = [tokenizer._inner.token_to_id(letter) for letter in "</s>"]
    at = tokenizer._inner.token_to_id("@")
    plain, starts = tokenizer.rendered(text)
    expected = [spelled[sum(plain[:i] == at) % 4] if index == at else index for i, index in enumerate(plain.tolist())]
    ids, marked_starts = tokenizer.rendered(text.replace("@@@@", "<~/s>"), mark="~")
    assert ids.tolist() == expected
    assert marked_starts[ids == tiny_sentencepiece.EOS].tolist() == [
        at for at in range(len(text) + 3) if text.replace("@@@@", "<~/s>").startswith("</s>", at)]
    assert len(starts) == len(marked_starts) and tokenizer.rendered(text)[0].tolist() == plain.tolist()


@pytest.mark.parametrize("kind, normalized", [("unigram", False), ("first", True), ("never", True)])
def test_a_control_token_that_cannot_be_characters_is_refused(tmp_path, kind, normalized):
    """A word of a Unigram model; or one that is looked for after the mark has gone."""
    tokenizer = sentencepiece(tmp_path, kind, normalized=normalized)
    assert tiny_sentencepiece.EOS in tokenizer.rendered("a~</s>", mark="~")[0]
    with pytest.raises(SpelledControl, match="spells the control token </s>, which .*tokenizer.json cannot take as "):
        tokenizer.rendered("<s>a\u00e9 <~/s></s>", mark="~")
    if kind == "unigram":
        with pytest.raises(SpelledControl):
            tokenizer.encode("a </s>")
    assert tokenizer.encode("a \u00e9")[-1] == 0         # what is unknown is no control token that was spelled


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
