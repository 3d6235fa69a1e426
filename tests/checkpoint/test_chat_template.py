"""The folder's own template, wherever it stands, with what transformers lets one call."""

import json

import pytest

from mesp_np.checkpoint import chat_template
from mesp_np.errors import UserError
from tests import tiny_tokenizer

HI = {"role": "user", "content": "Hi"}


def template(tmp_path, source, **config):
    return chat_template.find(tiny_tokenizer.write(tmp_path, chat_template=source, **config))


def rendered(tmp_path, source, *messages, **options):
    return template(tmp_path, source).render(list(messages) or [HI], **options)


def test_a_folder_without_a_template(tmp_path):
    assert chat_template.find(tmp_path) is None
    assert chat_template.find(tiny_tokenizer.write(tmp_path)) is None


def test_the_first_place_that_has_one_wins(tmp_path):
    (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}')
    assert chat_template.find(tmp_path).render([]) == "old"
    tiny_tokenizer.write(tmp_path, chat_template="config")
    assert chat_template.find(tmp_path).render([]) == "config"
    (tmp_path / "chat_template.jinja").write_text("own file ü", encoding="utf-8")
    assert chat_template.find(tmp_path).render([]) == "own file ü"


def test_of_named_templates_the_default(tmp_path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    assert rendered(tmp_path, named) == "yes"
    with pytest.raises(UserError, match="tokenizer_config.json: no chat template is named default, only tool_use"):
        template(tmp_path, named[:1])
    for wrong in (3, {"default": "x"}, ["x"], [{"name": "default", "template": 3}]):
        with pytest.raises(UserError, match="neither a string nor a list"):
            template(tmp_path, wrong)


def test_the_default_system_turn_is_the_folders(tmp_path):
    default = "<|im_start|>system\nYou are helpful.<|im_end|>\n"
    turn = "<|im_start|>user\nHi<|im_end|>\n"
    assert rendered(tmp_path, tiny_tokenizer.CHATML) == default + turn
    assert rendered(tmp_path, tiny_tokenizer.CHATML.replace("helpful", "terse")) == default.replace("helpful",
                                                                                                     "terse") + turn
    empty = {"role": "system", "content": ""}
    assert rendered(tmp_path, tiny_tokenizer.CHATML, empty, HI) == "<|im_start|>system\n<|im_end|>\n" + turn
    assert rendered(tmp_path, tiny_tokenizer.CHATML, generation_prompt=True).endswith(turn + "<|im_start|>assistant\n")


@pytest.mark.parametrize("source, expected", [
    ("{{ {'a': '<ü>&\"'} | tojson }}", '{"a": "<ü>&\\""}'),
    ("{{ {'b': 1, 'a': 'ü'} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
     '{"a":"\\u00fc","b":1}'),
    ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
    ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
     "{% endfor %}", "02"),
    ("  {% if true %}\nyes\n  {% endif %}\nend\n", "yes\nend"),
    ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "aHib"),
    ("{{ bos_token }}{{ eos_token }}|{{ sep_token }}", "<s><|endoftext|>|"),
    ("{{ strftime_now('%Y') | length }}", "4"),
    ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = 5 %}{% endfor %}{{ ns.n }}", "5"),
    ("{{ tools is none }}{{ add_generation_prompt }}", "TrueFalse"),
])
def test_what_a_template_may_use(tmp_path, source, expected):
    found = template(tmp_path, source, bos_token={"content": "<s>"}, sep_token=None)
    assert found.render([HI]) == expected


@pytest.mark.parametrize("source, words", [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ 'a' + messages[0].missing }}", "missing"),
    ("{{ 'a' + none }}", "can only concatenate str"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    ("{{ 1 // 0 }}", "division"),
])
def test_what_a_template_refuses_is_said_in_its_words(tmp_path, source, words):
    with pytest.raises(UserError, match=f"tokenizer_config.json: the chat template refuses .*({words})"):
        rendered(tmp_path, source)


def test_a_broken_template_is_named(tmp_path):
    with pytest.raises(UserError, match="tokenizer_config.json: the chat template is wrong .line 2: "):
        rendered(tmp_path, "a\n{% if %}")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="chat_template.jinja: cannot be read"):
        chat_template.find(tmp_path)


def test_tools_reach_the_template(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert json.loads(rendered(tmp_path, "{{ tools | tojson }}", tools=tools)) == tools
