"""What is learned of a conversation in templates of every form: the answers, each with its own end, and no header."""

from itertools import groupby

import pytest
from tokenizers import AddedToken

from mesp_np.checkpoint import chat_template
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.data.encode import Encoder
from mesp_np.data.records import BadRow, Record
from tests import templates, tiny_tokenizer

NAMES = ("<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>")
FORMS = {"LLAMA3": "<|eot_id|>", "LLAMA3_EARLY": "<|eot_id|>", "LLAMA2": "</s>", "ZEPHYR": "</s>",
         "GEMMA": "<end_of_turn>", "QWEN3": "<|im_end|>", "ALPACA": None}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """Make an Encoder that masks prompts, of a template by its name."""
    def make(name):
        folder = tiny_tokenizer.write(
            tmp_path_factory.mktemp("tokenizer"),
            lambda tokenizer: tokenizer.add_special_tokens(
                [AddedToken(name, special=True, normalized=False) for name in NAMES]),
            bos_token="<s>", eos_token="</s>", chat_template=getattr(templates, name))
        return Encoder(Tokenizer(folder, 300), chat_template.find(folder), mask_prompt=True)
    return make


def shown(encoder, *contents, first="user", asked=0):
    """A conversation as the model sees it, what is learned in [[ ]]."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    messages = tuple({"role": roles[i % 2], "content": content} for i, content in enumerate(contents))
    ids, mask = encoder.encode(Record("messages", "x.jsonl:7", messages=messages, asked=asked))
    parts = [(learned, encoder.tokenizer.decode([index for index, _ in part]))
             for learned, part in groupby(zip(ids, mask), key=lambda pair: pair[1])]
    return "".join(f"[[{text}]]" if learned else text for learned, text in parts)


@pytest.mark.parametrize("name, expected", [
    ("LLAMA3", "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant"
               "<|end_header_id|>\n\n[[Yo<|eot_id|>]]<|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>"
               "<|start_header_id|>assistant<|end_header_id|>\n\n[[2<|eot_id|>]]"),
    ("LLAMA2", "<s>[INST] Hi [/INST][[ Yo </s>]]<s>[INST] 1+1? [/INST][[ 2 </s>]]"),
    ("ZEPHYR", "<|user|>\nHi</s>\n<|assistant|>\n[[Yo</s>]]\n<|user|>\n1+1?</s>\n<|assistant|>\n[[2</s>]]\n"),
    ("GEMMA", "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n[[Yo<end_of_turn>]]\n"
              "<start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n[[2<end_of_turn>]]\n"),
    ("ALPACA", "<s>### user:\nHi\n\n### assistant:\n[[Yo\n\n]]### user:\n1+1?\n\n### assistant:\n[[2\n\n]]"),
])
def test_two_turns(encoder, name, expected):
    assert shown(encoder(name), "Hi", "Yo", "1+1?", "2") == expected


def test_a_header_that_always_stands_at_the_end_is_not_learned(encoder):
    header = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    early, now = encoder("LLAMA3_EARLY"), encoder("LLAMA3")
    for contents in (("Hi", "Yo"), ("Hi", "Yo", "1+1?", "2"), ("Hi", "")):
        assert shown(early, *contents) == shown(now, *contents) + header


def test_an_answer_that_is_rendered_with_its_thoughts_is_learned_with_them(encoder):
    assert shown(encoder("QWEN3"), "Hi", "<think>\nhm\n</think>\n\nYo") == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[<think>\nhm\n</think>\n\nYo<|im_end|>]]\n")
    assert "assistant\n[[<think>\n\n</think>\n\nYo<|im_end|>]]\n" in shown(encoder("QWEN3"), "Hi", "Yo")


def test_an_answer_that_is_rendered_differently_later_is_refused(encoder):
    for answer in ("<think>\nhm\n</think>\n\nYo", "Yo"):
        with pytest.raises(BadRow, match="x.jsonl:7: .*renders turn 2 differently when others follow"):
            shown(encoder("QWEN3"), "Hi", answer, "1+1?", "2")
    assert shown(encoder("QWEN3"), "Hi", "Yo", "1+1?", "2", asked=3).count("[[") == 1


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"LLAMA2", "QWEN3"}))
def test_an_answer_that_nothing_precedes_is_not_learned(encoder, name):
    """The rest of such a conversation is learned as ever."""
    begun = shown(encoder(name), "Welcome", "Hi", "Yo", first="assistant")
    assert begun.count("[[") == 1 and "Welcome" in begun.split("[[")[0]
    assert begun.split("[[")[1] == shown(encoder(name), "Hi", "Yo").split("[[")[1]
    assert "[[" not in shown(encoder(name), "Welcome", first="assistant")


def test_what_the_template_refuses_names_the_row(encoder):
    with pytest.raises(BadRow, match="x.jsonl:7: .*refuses this conversation .roles must alternate"):
        shown(encoder("LLAMA2"), "Welcome", "Hi", "Yo", first="assistant")


def test_an_answer_whose_header_cannot_be_asked_for_is_refused(encoder):
    for contents in (("Hi", "Yo"), ("Hi", "")):
        with pytest.raises(BadRow, match="x.jsonl:7: .*does not tell where turn 2 begins.*leave --mask-prompt out"):
            shown(encoder("SILENT"), *contents)


def test_a_header_that_is_missing_at_one_place_is_refused_there(encoder):
    """Here no header is written after a system turn alone, so the answer's would be learned."""
    zephyr = encoder("ZEPHYR")
    zephyr.chat._template = zephyr.chat._template.environment.from_string(
        templates.ZEPHYR.replace("loop.last and add", "loop.last and message.role == 'user' and add"))
    turns = ({"role": "system", "content": "Be terse."}, {"role": "assistant", "content": "Yo"})
    with pytest.raises(BadRow, match="does not tell where turn 2 begins"):
        zephyr.encode(Record("messages", "x", messages=turns))


@pytest.mark.parametrize("name, end", FORMS.items())
def test_a_turn_ends_as_the_learned_part_does(encoder, name, end):
    made = encoder(name)
    ids, mask = made.encode(Record("messages", "x", messages=tuple(
        {"role": role, "content": content} for role, content in (("user", "Hi"), ("assistant", "Yo")))))
    assert made.turn_end() == (made.tokenizer.rendered(end)[0][0] if end else None)
    assert made.tokenizer.decode(ids[mask]).endswith(end or "Yo\n\n")


@pytest.mark.parametrize("name", FORMS)
def test_control_tokens_in_messages_change_no_place(encoder, name):
    """What is learned is the answer as it was written, although it spells every control token."""
    spelled = "a" + "".join(NAMES) + "b"
    plain = shown(encoder(name), "Hi", "@")
    assert shown(encoder(name), "Hi", spelled) == plain.replace("@", spelled)
