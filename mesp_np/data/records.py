"""Records: the documents and rows in a user's files, before any of them becomes tokens.

    .txt      the whole file is one document; CRLF counts as a line end
    .jsonl    an object a line, {"text": "..."}; other keys are ignored
    folder    train.jsonl or train.txt, and perhaps valid.jsonl or valid.txt

Lines end at the newline byte and nowhere else: str.splitlines would also cut at U+2028,
which may stand inside a JSON string.  A byte-order mark, CRLF, blank lines and a missing
last newline are accepted.  Everything else that is odd is an error that names file, line
and reason, never a row that is quietly dropped or guessed.
"""

import codecs
import json
import re
from dataclasses import dataclass
from pathlib import Path

from mesp_np.errors import UserError

SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Record:
    """One piece of a user's data.

    kind     "document" (a .txt file) or "text" (a row); decides how it becomes tokens
    content  its text
    where    file and line, for messages
    """

    kind: str
    content: str
    where: str


def find(path):
    """(training file, validation file or None) of a file or a folder."""
    path = Path(path)
    if not path.is_dir():
        return path, None
    train, valid = (_one_of(path, stem) for stem in ("train", "valid"))
    if train is None:
        raise UserError(f"{path}: holds neither train.jsonl nor train.txt", "name a folder with one, or a file")
    return train, valid


def read(path):
    """The records of a .txt or .jsonl file, at least one.  Raises UserError for the first that is wrong."""
    path = Path(path)
    readers = {".txt": _read_document, ".jsonl": _read_rows}
    if path.suffix not in readers:
        raise UserError(f"{path}: is neither .txt nor .jsonl", "write plain text, or one JSON object a line")
    try:
        records = readers[path.suffix](path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})", "check the path given as --data") from None
    if not records:
        raise UserError(f"{path}: is empty", "it must hold some text")
    return records


def _one_of(folder, stem):
    found = [path for suffix in (".jsonl", ".txt") if (path := folder / (stem + suffix)).exists()]
    if len(found) > 1:
        raise UserError(f"{folder}: holds both {stem}.jsonl and {stem}.txt", "name the file that is meant")
    return found[0] if found else None


def _read_document(path):
    text = _decode(path.read_bytes().removeprefix(codecs.BOM_UTF8), path).replace("\r\n", "\n")
    return [Record("document", text, str(path))] if text.strip() else []


def _read_rows(path):
    records = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            line = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
            if line:
                records.append(_row(line, f"{path}:{number}"))
    return records


def _row(line, where):
    if line.startswith(b"["):
        raise UserError(f"{where}: a JSON array", "write one object a line: {\"text\": \"...\"}")
    try:
        row = json.loads(_decode(line, where), object_pairs_hook=lambda pairs: _each_once(pairs, where))
    except json.JSONDecodeError as error:
        reason = "more than one JSON value" if error.msg == "Extra data" else f"{error.msg}, column {error.colno}"
        raise UserError(f"{where}: not one JSON object ({reason})", "write one object a line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: cannot be read as JSON ({error})", "write one object a line") from None
    return Record("text", _text(row, where), where)


def _text(row, where):
    if not isinstance(row, dict):
        raise UserError(f"{where}: is no JSON object", "write {\"text\": \"...\"}")
    if "text" not in row:
        raise UserError(f"{where}: has no \"text\", only {', '.join(row) or 'nothing'}", "write {\"text\": \"...\"}")
    text = row["text"]
    if not isinstance(text, str):
        raise UserError(f"{where}: \"text\" is {json.dumps(text)[:40]}, not a string", "put it in quotes")
    if SURROGATE.search(text):
        raise UserError(f"{where}: \"text\" has half of a surrogate pair", "write the whole character")
    return text


def _decode(data, where):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte 0x{data[error.start]:02x} at {error.start})",
                        "save the file as UTF-8") from None


def _each_once(pairs, where):
    """A dict of an object's pairs; JSON itself would keep the last of two equal keys in silence."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise UserError(f"{where}: a key stands twice among {', '.join(key for key, _ in pairs)}", "keep one of them")
    return row
