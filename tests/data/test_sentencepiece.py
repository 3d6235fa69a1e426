"""Conversations and texts with tokenizers of SentencePiece's kind: every answer in its place, and no mark is seen."""

import pytest

from mesp_np.checkpoint import chat_template
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.data import records
from mesp_np.data.encode import Encoder
from tests import templates, tiny_sentencepiece
from tests.data.test_encode import encode, learned, turns

SENTENCEPIECE = [(kind, template) for kind in tiny_sentencepiece.KINDS for template in ("LLAMA2", "ZEPHYR")]


def sentencepiece(folder, kind, template):
    tiny_sentencepiece.write(folder, kind, chat_template=getattr(templates, template))
    return Encoder(Tokenizer(folder, tiny_sentencepiece.VOCAB_SIZE), chat_template.find(folder), mask_prompt=True)


@pytest.mark.parametrize("kind, template", SENTENCEPIECE)
def test_answers_in_tokens_of_sentencepiece(tmp_path, kind, template):
    """Exactly the answers, each with its </s>, whether a space stands before the first token or not."""
    encoder = sentencepiece(tmp_path, kind, template)
    found = learned(encoder, turns("an a\nb", "a b", "b", "an a"))
    assert [answer.strip(" ") for answer in found] == (
        ["a b </s>", "an a </s>"] if template == "LLAMA2" else ["a b</s>", "an a</s>"])


@pytest.mark.parametrize("kind, template", SENTENCEPIECE)
def test_control_tokens_in_messages_with_sentencepiece(tmp_path, kind, template):
    """The mark changes no other token; where a control token cannot be characters the row is refused."""
    encoder = sentencepiece(tmp_path, kind, template)
    ids, mask = encode(encoder, turns("an @@@@ a", "b @@@@"))
    spelled = [encoder.tokenizer._inner.token_to_id(letter) for letter in "</s>"]
    if kind == "unigram":
        with pytest.raises(records.BadRow, match="x.jsonl:7: spells the control token </s>, which .* cannot take"):
            encode(encoder, turns("an </s> a", "b </s>"))
        return
    at = [i for i, index in enumerate(ids) if index == encoder.tokenizer._inner.token_to_id("@")]
    for place, index in zip(at, spelled * 2, strict=True):
        ids[place] = index
    assert encode(encoder, turns("an </s> a", "b </s>")) == (ids, mask)


def test_texts_with_sentencepiece(tmp_path):
    encoder = sentencepiece(tmp_path, "unigram", "LLAMA2")
    encoder.mask_prompt = False
    assert encode(encoder, {"text": "a</s>"})[0] == [1, *encoder.tokenizer.encode("a"), 2]
    with pytest.raises(records.BadRow, match="x.jsonl:7: spells the control token </s>"):
        encode(encoder, {"text": "a</s> a"})
