"""Rows as users have them: the accepted forms and dirt, and every refusal with file, line and reason."""

import codecs
import json

import pytest

from mesp_np.data import files, records
from mesp_np.errors import UserError


def read(tmp_path, content, name="data.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    return [records.parse(where, content) for where, content in files.contents(path)]


def text(record):
    return "".join(record.pieces)


def one(tmp_path, row):
    return read(tmp_path, json.dumps(row).encode())[0]


@pytest.mark.parametrize("content, expected", [
    (b'{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
    (b'{"text": "a"}\n{"text": "b"}', ["a", "b"]),
    (codecs.BOM_UTF8 + b'{"text": "a"}\n', ["a"]),
    (b'{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
    (b'\n{"text": "a"}\n\n  \r\n{"text": "b"}\n\n', ["a", "b"]),
    (b'{"text": ""}\n', [""]),
    (b'{"text": "a", "id": 3, "meta": {"x": null}}\n', ["a"]),
    ('{"text": "a\u2028b\u2029c\x85d"}\n{"text": "\\u2028"}\n'.encode(), ["a\u2028b\u2029c\x85d", "\u2028"]),
    (b'{"text": "\\ud83c\\udfad\\n\\t"}\n', ["\U0001f3ad\n\t"]),
    (b"", []), (b"\n\n", []), (codecs.BOM_UTF8, []), (b"  \r\n", []),
])
def test_accepted_rows(tmp_path, content, expected):
    assert [text(record) for record in read(tmp_path, content)] == expected


def test_a_long_line(tmp_path):
    long = "x" * 50_000_000
    assert text(one(tmp_path, {"text": long})) == long


GOOD = b'{"text": "a"}\n\n'


@pytest.mark.parametrize("line, words", [
    (b'[{"text": "a"}, {"text": "b"}]', "a JSON array"),
    (b"[", "a JSON array"),
    (b'{"text": "a"} {"text": "b"}', "more than one JSON value"),
    (b'{"text": null}', '"text" is null, not a string'),
    (b'{"text": 3}', '"text" is 3, not a string'),
    (b'{"text": NaN}', '"text" is NaN, not a string'),
    (b'{"text": ["a"]}', 'not a string'),
    (b'{"text": "a", "text": "b"}', "a key stands twice among 'text', 'text'"),
    (b'{"messages": [{"role": "user", "role": "system"}]}', "a key stands twice among 'role', 'role'"),
    (b'{"text": "a\tb"}', "Invalid control character at, column 12"),
    (b'{"text": "a', "Unterminated string"),
    (b'{"text": "\xff"}', "not UTF-8 .byte 0xff at 10"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b'{"messages": [{"role": "user", "content": "\\uD800"}]}', "half of a surrogate pair"),
    (b'{"txt": "a", "id": 1}', "has only 'txt', 'id'; give text, messages"),
    (b'{"\\u001b[31mred\\nline": 1}', r"has only '\\x1b\[31mred\\nline'; give"),
    (b'{"' + b"x" * 1000 + b'": 1}', "has only 'x{12}[.]{3}x+'; give"),
    (b"{" + b",".join(b'"k%d": 1' % i for i in range(5000)) + b"}", "'k10', 'k11', and 4988 more; give"),
    (b"{}", "has only no keys"),
    (b'"a"', "no JSON object"),
    (b"a", "not one JSON object"),
    (b'{"a":' * 100_000, "cannot be read as JSON"),
    (b'{"prompt": "a"}', "has only 'prompt'"),
    (b'{"prompt": "a", "completion": null}', '"completion" is null, not a string'),
    (b'{"prompt": ["a"], "completion": []}', r'prompt\[0\] has no "role"'),
    (b'{"prompt": [], "completion": "a"}', '"completion" is "a", not a list of messages'),
    (b'{"messages": "a"}', '"messages" is "a", not a list of messages'),
    (b'{"messages": [3]}', r'messages\[0\] has no "role"'),
    (b'{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "a"}]}',
     r'messages\[1\]: "role" is "bot"; choose from system, user, assistant, tool'),
    (b'{"messages": [{"role": ["user"], "content": "a"}]}', '"role" is'),
    (b'{"messages": [{"role": "user", "content": null}]}', r'messages\[0\]: "content" is null, not a string'),
    (b'{"messages": [{"role": "user"}]}', '"content" is null, not a string'),
    (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "not a string"),
    (b'{"conversations": [{"from": "nobody", "value": "a"}]}', r'conversations\[0\]: "from" is "nobody"'),
    (b'{"instruction": "a", "input": 3, "output": "b"}', '"input" is 3, not a string'),
    (b'{"messages": [], "tools": "{"}', '"tools" is not JSON'),
    (b'{"messages": [], "tools": ["f"]}', '"tools" is'),
])
def test_refused_rows(tmp_path, line, words):
    (tmp_path / "data.jsonl").write_bytes(GOOD + line + b"\n" + GOOD)
    rows = list(files.contents(tmp_path / "data.jsonl"))
    assert [text(records.parse(*rows[i])) for i in (0, 2)] == ["a", "a"]
    with pytest.raises(records.BadRow, match=words) as raised:
        records.parse(*rows[1])
    assert "data.jsonl:3: " in str(raised.value)


def test_utf16(tmp_path):
    with pytest.raises(UserError, match="data.jsonl:1: not UTF-8"):
        read(tmp_path, '{"text": "a"}\n'.encode("utf-16"))


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("row, form, asked, plain", [
    ({"prompt": "q", "completion": "a"}, "completion", 1, ("q", "a")),
    ({"prompt": [USER], "completion": [ASSISTANT]}, "completion", 1, None),
    ({"messages": [USER, ASSISTANT]}, "messages", 0, None),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "conversations", 0, None),
    ({"instruction": "q", "output": "a"}, "instruction", 1, ("### Instruction:\nq\n\n### Response:\n", "a")),
    ({"instruction": "q", "input": "", "output": "a"}, "instruction", 1,
     ("### Instruction:\nq\n\n### Response:\n", "a")),
])
def test_every_form_is_a_conversation(tmp_path, row, form, asked, plain):
    record = one(tmp_path, row)
    assert record.messages == (USER, ASSISTANT)
    assert (record.form, record.asked, record.plain) == (form, asked, plain)
    assert not record.begins_with_answer


def test_an_answer_that_nothing_precedes(tmp_path):
    for turns, expected in (([ASSISTANT, USER], True), ([USER, ASSISTANT], False), ([], False)):
        assert bool(one(tmp_path, {"messages": turns}).begins_with_answer) == expected
    assert one(tmp_path, {"prompt": [], "completion": [ASSISTANT]}).begins_with_answer
    assert not one(tmp_path, {"prompt": [ASSISTANT], "completion": [ASSISTANT]}).begins_with_answer


def test_the_form_is_decided_for_each_row_and_in_this_order(tmp_path):
    row = {"prompt": "p", "completion": "c", "messages": [], "conversations": [], "instruction": "i", "output": "o",
           "text": "t"}
    forms = []
    for gone in ((), ("prompt",), ("messages",), ("conversations",), ("instruction",)):
        row = {key: value for key, value in row.items() if key not in gone}
        forms.append(one(tmp_path, row).form)
    assert forms == ["completion", "messages", "conversations", "instruction", "text"]
    content = b'{"text": "a"}\n{"messages": []}\n{"text": "b"}\n'
    assert [record.form for record in read(tmp_path, content)] == ["text", "messages", "text"]


def test_sharegpt_roles(tmp_path):
    names = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
             "tool": "tool", "observation": "tool"}
    record = one(tmp_path, {"conversations": [{"from": name, "value": "", "weight": 1} for name in names]})
    assert [message["role"] for message in record.messages] == list(names.values())
    assert record.messages[0] == {"role": "system", "content": "", "weight": 1}


def test_tools_and_calls(tmp_path):
    tools, call = [{"type": "function"}], {"role": "assistant", "tool_calls": [{"name": "f"}]}
    for given in (tools, json.dumps(tools)):
        record = one(tmp_path, {"messages": [call], "tools": given})
        assert record.tools == tools and record.messages == (call | {"content": None},)
    assert one(tmp_path, {"messages": [], "tools": None}).tools is None
