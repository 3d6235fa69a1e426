"""The tools that make real checkpoints, tokenizers and chats: what they do before and after they download."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from mesp_np.checkpoint.chat_template import ChatTemplate

TOOLS = Path(__file__).parents[1] / "tools"

PLAY = """\
ACT I

SCENE I. A harbour.

[Enter MARTA]

MARTA:
Who moved the post?

OLD PETER:
[Aside] Not I.
The sea did.

[Thunder]

Or the wind.

MARTA:
The sea!

Boy:
A sail!

SCENE II. A hill.

Boy:
Alone at last.
"""


@pytest.fixture
def tool(monkeypatch):
    """A function from a tool's name to its module; they find each other as scripts of one folder do."""
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module


def test_a_play_becomes_conversations(tool):
    """Two take turns, directions are dropped, a third speaker or a new scene ends it, a question has an answer."""
    chats = tool("make_chats")
    assert [run for run in chats.conversations(PLAY) if chats.is_short(run)] == [
        [("MARTA", "Who moved the post?"), ("OLD PETER", "Not I.\nThe sea did.\nOr the wind.")]]
    (line,) = chats.records("the-sea-s-post-part-ii", PLAY).splitlines()
    system, *turns = json.loads(line)["messages"]
    assert system["content"] == ("The Sea's Post Part II, by William Shakespeare. "
                                 "You are OLD PETER, and MARTA speaks to you.")
    assert [turn["role"] for turn in turns] == ["user", "assistant"]


def test_a_merge_joins_what_lower_ranks_have_made(tool):
    """abc is ab + c although bc is a token too, as ab comes first."""
    ranks = {b"a": 0, b"b": 1, b"c": 2, b"ab": 3, b"bc": 4, b"abc": 5, b"abcab": 6}
    last_merge = tool("make_qwen_tokenizer").last_merge
    assert last_merge(b"abc", ranks | {b"abc": 5}) == (b"ab", b"c")
    assert last_merge(b"abcab", ranks) == (b"abc", b"ab")


@pytest.mark.parametrize("kind, default", [
    ("instruct", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    ("base", "You are a helpful assistant.")])
def test_the_template_of_qwen(tool, kind, default):
    template = ChatTemplate("template", tool("make_qwen_tokenizer").config(kind)["chat_template"], {})
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    assert template.render(turns) == f"<|im_start|>system\n{default}<|im_end|>\n{text}"
    assert template.render([{"role": "system", "content": ""}, *turns], generation_prompt=True) == (
        f"<|im_start|>system\n<|im_end|>\n{text}<|im_start|>assistant\n")


def test_calls_are_json_and_their_results_share_a_turn(tool):
    template = ChatTemplate("template", tool("make_qwen_tokenizer").config("instruct")["chat_template"], {})
    calls = [{"function": {"name": "add", "arguments": {"a": a}}} for a in (1, 2)]
    turns = [{"role": "user", "content": "Add"}, {"role": "assistant", "content": "", "tool_calls": calls},
             *({"role": "tool", "content": result} for result in "34"), {"role": "assistant", "content": "7"}]
    text = template.render(turns, tools=[{"name": "add", "hint": "<é>"}])
    assert '<tools>\n{"name": "add", "hint": "<é>"}\n</tools>' in text
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n")


@pytest.mark.oracle
def test_blocks_of_a_gguf_file_become_codes_scales_and_biases(tool):
    """As the package `gguf` dequantises them, to the bit."""
    gguf = pytest.importorskip("gguf")
    rng, kinds = np.random.default_rng(0), gguf.GGMLQuantizationType
    for kind, size, bits in (kinds.Q4_1, 20, 4), (kinds.Q8_0, 34, 8):
        blocks = rng.integers(0, 256, (3, 2, size), np.uint8)
        blocks[..., :2] = np.float16(rng.random((3, 2, 1))).view(np.uint8)                  # scales that are numbers
        if kind == kinds.Q4_1:
            blocks[..., 2:4] = np.float16(-rng.random((3, 2, 1))).view(np.uint8)
        rows = blocks.reshape(3, -1)
        weight = tool("make_smollm2").decode(rows, kind)
        assert np.array_equal(weight.dense(), gguf.quants.dequantize(rows, kind)) and weight.bits == bits
        first = weight.words()[:, 0, np.newaxis] >> np.arange(0, 32, bits) & (1 << bits) - 1
        assert np.array_equal(first, weight.codes[:, :32 // bits])


@pytest.mark.oracle
def test_rope_rows_return_to_their_halves(tool):
    """Two heads of four rows: the file has 0 2 1 3 of each, side by side what turns together."""
    pytest.importorskip("gguf")
    stored = np.array([0, 2, 1, 3, 4, 6, 5, 7])
    assert stored[tool("make_smollm2").rope_order(8, heads=2)].tolist() == list(range(8))
