"""Records: the documents and rows in a user's files, before any of them becomes tokens.

A row has one of these forms, tried in this order; other keys are ignored:

    {"prompt", "completion"}                  both strings, or both lists of messages
    {"messages": [{"role", "content"}]}       roles system, user, assistant, tool
    {"conversations": [{"from", "value"}]}    ShareGPT: human, gpt and their like
    {"instruction", "input", "output"}        Alpaca; input may be missing
    {"text"}

A conversation may have "tools" beside it, a list or that list as a JSON string.

Whatever is odd is a BadRow that names file, line and reason, never a row quietly dropped
or guessed.  A document is no row but a whole file; `files` reads it.
"""

import json
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass

from mesp_np.errors import LISTED, UserError

TEXTS = ("document", "text")             # forms of a record that are no conversation
FORMS = "text, messages, conversations, prompt and completion, or instruction and output"
ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
SHAREGPT_ROLES = ROLES | {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
                          "model": "assistant", "observation": "tool"}


class BadRow(UserError):
    """A row that cannot be used.  A reader may skip it and go on with the next."""


@dataclass(frozen=True)
class Record:
    """One piece of a user's data.

    form      document, text, completion, messages, conversations or instruction
    where     file and line, for messages
    pieces    a document's or a text's characters, in strings that can be read once
    messages  a conversation: dicts with role and content, as a chat template takes them
    asked     how many of the messages are the question, and are not to be learned
    tools     what the template is to offer the model, or None
    plain     (prompt, answer) for a model without a chat template, or None
    """

    form: str
    where: str
    pieces: Iterable[str] = ()
    messages: tuple = ()
    asked: int = 0
    tools: list | None = None
    plain: tuple | None = None

    @property
    def begins_with_answer(self):
        """Whether the first message is an answer that nothing precedes."""
        return not self.asked and self.messages[:1] and self.messages[0]["role"] == "assistant"


def parse(where, content):
    """The Record of what `files.contents` yields.  Raises BadRow."""
    if not isinstance(content, bytes):
        return Record("document", where, content)
    row = _object(content.strip(), where)
    for keys, make in READERS.items():
        if all(key in row for key in keys):
            return make(row, where)
    raise BadRow(f"{where}: has only {_listed(row) or 'no keys'}", f"give {FORMS}")


def not_utf8(where, error, end):
    """The BadRow for an error in decoding bytes of a file or row, of which the last stands before the place `end`."""
    at, byte = end - len(error.object) + error.start, error.object[error.start]
    return BadRow(f"{where}: not UTF-8 (byte 0x{byte:02x} at {at})", "save the file as UTF-8")


def _object(line, where):
    if line.startswith(b"["):
        raise BadRow(f"{where}: a JSON array", "write one object a line: {\"text\": \"...\"}")
    try:
        row = json.loads(_decode(line, where), object_pairs_hook=lambda pairs: _each_once(pairs, where))
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        reason = "more than one JSON value" if error.msg == "Extra data" else f"{error.msg}, column {error.colno}"
        raise BadRow(f"{where}: not one JSON object ({reason})", "write one object a line") from None
    except UnicodeEncodeError:
        raise BadRow(f"{where}: has half of a surrogate pair", "write the whole character") from None
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where}: cannot be read as JSON ({error})", "write one object a line") from None
    if not isinstance(row, dict):
        raise BadRow(f"{where}: is no JSON object", f"give {FORMS}")
    return row


def _decode(data, where):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(where, error, len(data)) from None


def _listed(keys):
    """The first keys, whatever characters they have and however long they are."""
    keys = list(keys)
    more = [f"and {len(keys) - LISTED} more"] if len(keys) > LISTED else []
    return ", ".join([reprlib.repr(key) for key in keys[:LISTED]] + more)


def _each_once(pairs, where):
    """A dict of an object's pairs; JSON itself would keep the last of two equal keys in silence."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise BadRow(f"{where}: a key stands twice among {_listed(key for key, _ in pairs)}", "keep one of them")
    return row


def _completion(row, where):
    if isinstance(row["prompt"], list):
        asked, answer = (_messages(row, key, where) for key in ("prompt", "completion"))
        return Record("completion", where, messages=asked + answer, asked=len(asked), tools=_tools(row, where))
    prompt, completion = (_string(row, key, where) for key in ("prompt", "completion"))
    return Record("completion", where, messages=_exchange(prompt, completion), asked=1, tools=_tools(row, where),
                  plain=(prompt, completion))


def _chat(row, where):
    return Record("messages", where, messages=_messages(row, "messages", where), tools=_tools(row, where))


def _sharegpt(row, where):
    turns = _messages(row, "conversations", where, ("from", "value"), SHAREGPT_ROLES)
    return Record("conversations", where, messages=turns, tools=_tools(row, where))


def _alpaca(row, where):
    """With a chat template the input follows the instruction after a blank line; without, Alpaca's headings."""
    instruction, output = (_string(row, key, where) for key in ("instruction", "output"))
    given = _string(row, "input", where) if row.get("input") else ""
    question = f"{instruction}\n\n{given}" if given else instruction
    headed = (f"### Instruction:\n{instruction}\n\n" + (f"### Input:\n{given}\n\n" if given else "")
              + "### Response:\n")
    return Record("instruction", where, messages=_exchange(question, output), asked=1, plain=(headed, output))


def _text(row, where):
    return Record("text", where, (_string(row, "text", where),))


READERS = {("prompt", "completion"): _completion, ("messages",): _chat, ("conversations",): _sharegpt,
           ("instruction", "output"): _alpaca, ("text",): _text}


def _exchange(question, answer):
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


def _string(row, key, where):
    if not isinstance(row[key], str):
        raise BadRow(f"{where}: \"{key}\" is {json.dumps(row[key])[:40]}, not a string", "put it in quotes")
    return row[key]


def _messages(row, key, where, names=("role", "content"), roles=ROLES):
    """The messages in a list, roles and contents under their usual names, other keys as they are."""
    if not isinstance(row[key], list):
        raise BadRow(f"{where}: \"{key}\" is {json.dumps(row[key])[:40]}, not a list of messages",
                     f"write [{{\"{names[0]}\": ..., \"{names[1]}\": ...}}]")
    return tuple(_message(turn, f"{where}: {key}[{index}]", names, roles) for index, turn in enumerate(row[key]))


def _message(turn, where, names, roles):
    role_key, content_key = names
    if not isinstance(turn, dict) or role_key not in turn:
        raise BadRow(f"{where} has no \"{role_key}\"", f"write {{\"{role_key}\": ..., \"{content_key}\": ...}}")
    role = turn[role_key]
    if not isinstance(role, str) or role not in roles:
        raise BadRow(f"{where}: \"{role_key}\" is {json.dumps(role)[:40]}", f"choose from {', '.join(roles)}")
    content = turn.get(content_key)
    if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
        raise BadRow(f"{where}: \"{content_key}\" is {json.dumps(content)[:40]}, not a string", "put it in quotes")
    others = {key: value for key, value in turn.items() if key not in names}
    return {"role": roles[role], "content": content} | others


def _tools(row, where):
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadRow(f"{where}: \"tools\" is not JSON ({error})", "write a list of function descriptions") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow(f"{where}: \"tools\" is {json.dumps(tools)[:40]}", "write a list of function descriptions")
    return tools
