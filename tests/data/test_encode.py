"""Tokens and masks by hand: what a conversation becomes, and exactly which of it is learned."""

import json

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from mesp_np.checkpoint import chat_template
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.data import records
from mesp_np.data.encode import Encoder
from mesp_np.errors import UsageError, UserError
from tests import tiny_tokenizer
from tests.tiny_tokenizer import CHATML, EOS, IM_END, IM_START


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Make an Encoder of a folder with a chat template (None: without)."""
    def make(template=CHATML, mask_prompt=False, eos=True, change=lambda tokenizer: None):
        config = {} if template is None else {"chat_template": template}
        folder = tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), change, **config)
        tokenizer = Tokenizer(folder, tiny_tokenizer.VOCAB_SIZE)
        return Encoder(tokenizer, chat_template.find(folder), mask_prompt, eos)
    return make


def encode(encoder, row):
    """(ids, mask) of a row, as lists."""
    record = records.parse("x.jsonl:7", json.dumps(row).encode())
    ids, mask = streamed(encoder, record) if record.form in records.TEXTS else encoder.encode(record)
    assert ids.dtype == np.int32 and mask.dtype == bool and len(ids) == len(mask)
    return ids.tolist(), mask.tolist()


def streamed(encoder, record):
    """(ids, mask) of a text, of which all is learned."""
    ids = np.concatenate([ids for ids, _ in encoder.stream(record)])
    return ids, np.ones(len(ids), bool)


def spells_control(encoder, *pieces):
    return any(spelled for _, spelled in encoder.stream(records.Record("document", "x.txt", pieces)))


def learned(encoder, row):
    """The learned stretches of a row, as text."""
    ids, mask = encode(encoder, row)
    pieces, at = [], 0
    while at < len(ids):
        stop = next((i for i in range(at, len(ids)) if mask[i] != mask[at]), len(ids))
        if mask[at]:
            pieces.append(encoder.tokenizer.decode(ids[at:stop]))
        at = stop
    return pieces


def turns(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_a_conversation_token_by_token(encoders):
    """Two turns: learned are both answers with the token that ends each, and nothing else."""
    encoder = encoders(mask_prompt=True)
    text = encoder.tokenizer.encode
    parts = [([IM_START, *text("system\nYou are helpful."), IM_END, *text("\n")], 0),
             ([IM_START, *text("user\nHi"), IM_END, *text("\n")], 0),
             ([IM_START, *text("assistant\n")], 0), ([*text("Hello"), IM_END], 1), (text("\n"), 0),
             ([IM_START, *text("user\n1+1?"), IM_END, *text("\n")], 0),
             ([IM_START, *text("assistant\n")], 0), ([*text("2"), IM_END], 1), (text("\n"), 0)]
    ids, mask = encode(encoder, turns("Hi", "Hello", "1+1?", "2"))
    assert ids == sum((ids for ids, _ in parts), [])
    assert mask == sum(([bool(on)] * len(ids) for ids, on in parts), [])
    assert all(encode(encoders(), turns("Hi", "Hello", "1+1?", "2"))[1])


def test_answers_of_every_form(encoders):
    masked = encoders(mask_prompt=True)
    for row in (turns("Hi", "Yo"), {"prompt": "Hi", "completion": "Yo"},
                {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Yo"}]},
                {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
                {"instruction": "Hi", "input": "", "output": "Yo"}):
        assert learned(masked, row) == ["Yo<|im_end|>"]
        assert encode(encoders(), row)[0] == encode(masked, row)[0] == encode(masked, turns("Hi", "Yo"))[0]
    with_input = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert encode(masked, with_input) == encode(masked, turns("Add\n\n1 2", "3"))


def test_answers_in_a_prompt_are_not_learned(encoders):
    asked, answer = turns("a", "b", "c")["messages"], [{"role": "assistant", "content": "d"}]
    assert learned(encoders(mask_prompt=True), {"prompt": asked, "completion": answer}) == ["d<|im_end|>"]
    assert learned(encoders(mask_prompt=True), {"messages": asked + answer}) == ["b<|im_end|>", "d<|im_end|>"]


def test_without_a_template_prompt_and_completion_are_joined(encoders):
    plain, masked = encoders(None), encoders(None, mask_prompt=True)
    row = {"prompt": "ab", "completion": "cd"}
    assert encode(plain, row) == (plain.tokenizer.encode("abcd") + [EOS], [True] * 5)
    assert encode(masked, row)[1] == [False, False, True, True, True]
    assert learned(masked, {"instruction": "I", "input": "X", "output": "Y"}) == ["Y<|endoftext|>"]
    ids, _ = encode(plain, {"instruction": "I", "input": "X", "output": "Y"})
    assert plain.tokenizer.decode(ids) == "### Instruction:\nI\n\n### Input:\nX\n\n### Response:\nY<|endoftext|>"
    with pytest.raises(UserError, match="x.jsonl:7: is a conversation, and the model's folder has no chat template"):
        encode(plain, turns("Hi", "Yo"))
    with pytest.raises(UserError, match="has no chat template"):
        plain.prompt(turns("Hi")["messages"])


def test_control_tokens_in_messages_are_characters(encoders):
    encoder = encoders(mask_prompt=True)
    text, content = encoder.tokenizer.encode, "a<|im_end|>b<|im_start|>system"
    ids, mask = encode(encoder, turns(content, content))
    question = [IM_START, *text("user\n" + content), IM_END, *text("\n")]
    answer = [*text(content), IM_END]
    assert ids == [IM_START, *text("system\nYou are helpful."), IM_END, *text("\n"), *question, IM_START,
                   *text("assistant\n"), *answer, *text("\n")]
    assert np.flatnonzero(mask).tolist() == list(range(len(ids) - 1 - len(answer), len(ids) - 1))
    assert ids.count(IM_END) == 3 and "\ue000" not in encoder.tokenizer.decode(ids)
    assert encoder.prompt(turns(content)["messages"])[-len(question) - 11:-11] == question


def test_control_tokens_in_tools_are_characters(encoders):
    encoder = encoders("{{ tools | tojson }}<|im_start|>{% for m in messages %}{{ m.tool_calls | tojson }}{% endfor %}")
    call = {"role": "assistant", "content": None, "tool_calls": [{"<|im_end|>": ["<|endoftext|>"]}]}
    ids, _ = encode(encoder, {"messages": [call], "tools": [{"name": "<|im_end|>"}]})
    assert [i for i in ids if i >= EOS] == [IM_START]
    assert encoder.tokenizer.decode(ids) == '[{"name": "<|im_end|>"}]<|im_start|>[{"<|im_end|>": ["<|endoftext|>"]}]'


def test_the_mark_is_a_character_that_nobody_wrote(encoders):
    encoder = encoders()
    content = "\ue000\ue001<|im_end|>"
    ids, _ = encode(encoder, turns(content, "\ue003"))
    assert encoder.tokenizer.decode(ids).count(content) == 1
    assert ids == encode(encoder, turns(content, "\ue003"))[0] and ids.count(IM_END) == 3


def test_empty_and_missing_contents(encoders):
    masked = encoders(mask_prompt=True)
    assert learned(masked, turns("Hi", "")) == ["<|im_end|>"]
    assert learned(masked, turns("", "Yo")) == ["Yo<|im_end|>"]
    assert encode(masked, {"messages": []}) == ([], [])
    assert learned(masked, turns("Hi")) == []
    assert learned(masked, {"prompt": "Hi", "completion": ""}) == ["<|im_end|>"]
    assert learned(encoders(None, mask_prompt=True), {"prompt": "Hi", "completion": ""}) == ["<|endoftext|>"]


def test_texts_have_no_prompt_to_mask(encoders):
    with pytest.raises(UsageError, match="--mask-prompt: x.jsonl:7 is a text"):
        encode(encoders(mask_prompt=True), {"text": "a"})


def test_the_end_of_text_is_appended_once(encoders):
    encoder = encoders()
    a = encoder.tokenizer.encode("a")
    assert encode(encoder, {"text": "a"})[0] == encode(encoder, {"text": "a<|endoftext|>"})[0] == [*a, EOS]
    assert encode(encoders(eos=False), {"text": "a"})[0] == a
    assert encode(encoder, {"text": "<|endoftext|>a"})[0] == [*encoder.tokenizer.encode("<|endoftext|>a"), EOS]
    assert encode(encoders(eos=False), turns("a", "b")) == encode(encoder, turns("a", "b"))


def test_a_begin_of_text_stands_before_texts_and_not_in_conversations(encoders):
    def change(tokenizer):
        tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", IM_START)])
    encoder = encoders(change=change)
    a, b = encoder.tokenizer.encode("ab")
    assert encode(encoder, {"text": "ab"})[0] == [IM_START, a, b, EOS]
    assert encode(encoder, turns("a", "b")) == encode(encoders(), turns("a", "b"))
    joined = encode(encoders(None, mask_prompt=True, change=change), {"prompt": "a", "completion": "b"})
    assert joined == ([IM_START, a, b, EOS], [False, False, True, True])


def test_what_the_template_refuses_names_the_row(encoders):
    with pytest.raises(records.BadRow, match="x.jsonl:7: .*refuses this conversation .*alternate"):
        encode(encoders("{{ raise_exception('must alternate') }}"), turns("a", "b"))


def test_texts_that_spell_control_tokens(encoders):
    """At the very end the name of the end of text is the end of text, once."""
    encoder = encoders()
    for pieces, spelled in ((["a"], False), (["a<|endoftext|>"], False), (["<|endoftext|>a"], True), ([""], False),
                            (["<|endo", "ftext|>"], False), (["<|im_", "start|>"], True),
                            (["<|endoftext|>"] * 2, True)):
        assert spells_control(encoder, *pieces) == spelled
    assert spells_control(encoders(eos=False), "a<|endoftext|>")


def test_a_token_belongs_to_where_it_begins(encoders):
    """One token of the last character before an answer and the first of it is not learned."""
    def change(tokenizer):
        state = json.loads(tokenizer.to_str())
        state["model"]["vocab"]["bc"], state["model"]["merges"] = 259, [["b", "c"]]
        return state
    encoder = encoders(None, mask_prompt=True)
    merged = type(encoder.tokenizer._inner).from_str(json.dumps(change(encoder.tokenizer._inner)))
    merged.encode_special_tokens = True
    encoder.tokenizer._inner, encoder.tokenizer.vocab_size = merged, 260
    a, d = merged.token_to_id("a"), merged.token_to_id("d")
    assert encode(encoder, {"prompt": "ab", "completion": "cd"}) == ([a, 259, d, EOS], [False, False, True, True])


def test_a_control_token_whose_name_json_would_escape(encoders):
    """Names with a quotation mark, a backslash and a line end, written in contents, keys and tools."""
    names = ['<|"|>', "<|\\|>", "<|\n|>"]
    encoder = encoders("{% for m in messages %}{{ m.content }}{{ m.key | list | join }}{% endfor %}"
                       "{% if tools %}{{ tools[0].name }}{% endif %}<|im_end|>",
                       change=lambda tokenizer: tokenizer.add_special_tokens(names))
    encoder.tokenizer.vocab_size += len(names)
    for name in names:
        row = {"messages": [{"role": "user", "content": name, "key": {name: 1}}], "tools": [{"name": name}]}
        ids, _ = encode(encoder, row)
        assert [index for index in ids if index >= EOS] == [IM_END]
        assert encoder.tokenizer.decode(ids) == 3 * name + "<|im_end|>"


def test_control_tokens_that_overlap_are_characters(encoders):
    encoder = encoders(change=lambda tokenizer: tokenizer.add_special_tokens(["|>|"]))
    encoder.tokenizer.vocab_size += 1
    ids, _ = encode(encoder, turns("<|im_end|>|>|im_end|>", "|>|>|"))
    assert [index for index in ids if index >= EOS] == [IM_START, IM_END] * 3


def test_how_a_conversation_begins_and_ends(encoders):
    encoder = encoders()
    ids, _ = encode(encoder, turns("Hi", "Hello", "1+1?", "2"))
    assert encoder.opening(np.array(ids)) == encoder.prompt(turns("Hi")["messages"])
    assert encoder.opening(np.array(ids[:5])) is None and encoders(None).opening(np.array(ids)) is None
    assert encoder.turn_end() == IM_END and encoders(None).turn_end() is None


PIECES = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|", "im_end|>", "\n", " ", "ü", "\ue000", "assistant", "🎭"]


def test_no_content_changes_what_a_conversation_is(encoders, rng):
    """Whatever is written in it: the template's control tokens and no others, and the answers as they were written."""
    encoder = encoders(mask_prompt=True)
    for _ in range(100):
        contents = ["".join(rng.choice(PIECES, rng.integers(6))) for _ in range(rng.integers(2, 6))]
        ids, _ = encode(encoder, turns(*contents))
        assert [i for i in ids if i >= EOS] == [IM_START, IM_END] * (len(contents) + 1)
        assert learned(encoder, turns(*contents)) == [answer + "<|im_end|>" for answer in contents[1::2]]
