"""Against transformers, with the real tokenizer of Qwen2.5: the same ids, for texts and for conversations.

Runs where transformers is installed and MESP_NP_QWEN_TOKENIZER names a folder with Qwen2.5's tokenizer.json and
tokenizer_config.json (`tools/make_qwen_tokenizer.py` makes one).
"""

import json
import os

import pytest

from mesp_np.checkpoint import chat_template
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.data import records
from mesp_np.data.encode import Encoder

pytestmark = pytest.mark.oracle

TEXTS = ["", " ", "\n", "Hello, world!", "  two  spaces\t\ttabs\r\n\r\nCRLF\n\n\n", "don't DON'T we'll I'D",
         "1234567890", "naïve café e\u0301 \u212b ﬁ", "漢字かな交じり文。「引用」", "한국어 조합 \u1112\u1161\u11ab",
         "עברית العربية हिन्दी ไทย",
         "🎭👩‍👩‍👧‍👦🏳️‍🌈 \U0001f1e9\U0001f1ea", "\u2028\u2029\x85\u200b\ufeff", "\x00\x01\x7f",
         "def f(x):\n    return x ** 2\n",
         "<tool_call>{}</tool_call> <|fim_prefix|>", "a" * 3000, "https://example.org/?q=%20&x=[1]#é", "\ue000 \ufffd"]
SYSTEM = {"role": "system", "content": "Be terse.\n"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & \"ü\"", "parameters": {
    "type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "add", "arguments": {"x": 1, "né": "<&>"}}}]}
RESULTS = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


CHATS = [turns("Hi", "Hello"), turns("Hi", "Hello", "1+1?", "2"), [SYSTEM, *turns("Hi", "Hello 🎭\n\n", "  ", "")],
         [{"role": "system", "content": ""}, *turns("Hi", "Yo")], turns(*TEXTS[3:15]),
         [*turns("1+2?"), CALL, *RESULTS, {"role": "assistant", "content": "7"}]]


@pytest.fixture(scope="module")
def folder():
    path = os.environ.get("MESP_NP_QWEN_TOKENIZER")
    if not path:
        pytest.skip("MESP_NP_QWEN_TOKENIZER names no folder; make one with tools/make_qwen_tokenizer.py")
    return path


@pytest.fixture(scope="module")
def encoder(folder):
    return Encoder(Tokenizer(folder, 151936), chat_template.find(folder))


@pytest.fixture(scope="module")
def theirs(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_texts(encoder, theirs, text):
    assert encoder.tokenizer.encode(text) == theirs.encode(text)


def test_a_page_in_blocks(encoder, theirs, monkeypatch):
    page = "\n".join([*TEXTS, "The quick brown fox. " * 50] * 5)
    whole = theirs.encode(page)
    monkeypatch.setattr("mesp_np.checkpoint.tokenizer.BLOCK", 200)
    assert encoder.tokenizer.encode(page) == whole


@pytest.mark.parametrize("chat", CHATS, ids=lambda chat: f"{len(chat)} turns")
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_conversations(encoder, theirs, chat, tools):
    row = {"messages": chat, "tools": tools}
    ids, _ = encoder.encode(records.parse("x.jsonl:1", json.dumps(row).encode()))
    assert ids.tolist() == theirs.apply_chat_template(chat, tools=tools, return_dict=False)
    prompt = theirs.apply_chat_template(chat[:-1], tools=tools, add_generation_prompt=True, return_dict=False)
    assert encoder.prompt(chat[:-1], tools) == prompt


def test_a_conversation_of_the_instruct_template(encoder):
    """<|im_start|> is 151644, <|im_end|> 151645, a line end 198; user 872, assistant 77091, system 8948."""
    ids = encoder.prompt([{"role": "system", "content": ""}, *turns("")])
    assert ids == [151644, 8948, 198, 151645, 198, 151644, 872, 198, 151645, 198, 151644, 77091, 198]


def test_control_tokens_in_messages_are_characters(encoder, theirs):
    """As transformers encodes them once they are cut in two by hand; the turns around stay as they are."""
    content = "a<|im_end|>b <|im_start|>system"
    ids, _ = encoder.encode(records.Record("messages", "x", messages=tuple(turns(content, content))))
    plain = theirs.encode(content, split_special_tokens=True)
    around = theirs.apply_chat_template(turns("@", "@"), return_dict=False)
    at, = theirs.encode("@")
    assert ids.tolist() == [i for token in around for i in (plain if token == at else [token])]
