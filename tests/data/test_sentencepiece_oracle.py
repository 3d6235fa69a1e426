"""Against transformers: tokenizers of SentencePiece's kind, in conversations of two templates, token for token."""

import pytest

from mesp_np.checkpoint import chat_template
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.data.encode import Encoder
from mesp_np.data.records import Record
from tests import templates, tiny_sentencepiece

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("template", ["LLAMA2", "ZEPHYR"])
@pytest.mark.parametrize("kind", tiny_sentencepiece.KINDS)
def test_conversations(tmp_path, kind, template):
    """</s> in a message is four letters, as @@@@ is for transformers, which has no way to say so."""
    transformers = pytest.importorskip("transformers")
    tiny_sentencepiece.write(tmp_path, kind, chat_template=getattr(templates, template))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    encoder = Encoder(Tokenizer(tmp_path, tiny_sentencepiece.VOCAB_SIZE), chat_template.find(tmp_path))
    letters = theirs.convert_tokens_to_ids(list("</s>"))
    for content in ("an a\nb", "an @@@@ a\n", "@@@@", "\u00fc\n  b @@@@ @@@@"):
        chat = [{"role": role, "content": content} for role in ("user", "assistant")]
        expected = theirs.apply_chat_template(chat, return_dict=False)
        assert encoder.encode(Record("messages", "x", messages=tuple(chat)))[0].tolist() == expected
        spelling = iter(letters * content.count("@@@@") * 2)
        expected = [next(spelling) if token == theirs.convert_tokens_to_ids("@") else token for token in expected]
        spelled = tuple(turn | {"content": content.replace("@@@@", "</s>")} for turn in chat)
        if kind != "unigram":
            assert encoder.encode(Record("messages", "x", messages=spelled))[0].tolist() == expected
