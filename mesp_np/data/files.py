"""Files: which of a user's files is meant, and what stands in it, read a part at a time.

    .txt      the whole file is one document, read a piece at a time; CRLF counts as a line end
    .jsonl    an object a line, read line by line
    folder    train.jsonl or train.txt, and perhaps valid and test files of the same kinds

A name may end in capitals, as in .TXT.  Lines of a .jsonl file end at the newline byte and
nowhere else: str.splitlines would also cut at U+2028, which may stand inside a JSON string.
A byte-order mark, CRLF, blank lines and a missing last newline are accepted.
"""

import codecs
from contextlib import contextmanager
from pathlib import Path

from mesp_np.data.records import not_utf8
from mesp_np.errors import UserError

KINDS = (".jsonl", ".txt")
PIECE = 1 << 20                          # bytes of a document that are read at a time


def find(path, stem="train"):
    """The file of a folder called `stem`.jsonl or .txt, or None; a file is its own training file."""
    path = Path(path)
    if not path.is_dir():
        return path if stem == "train" else None
    found = [file for file in sorted(path.glob(f"{stem}.*")) if file.stem == stem and _kind(file) in KINDS]
    if len(found) > 1:
        raise UserError(f"{path}: holds both {found[0].name} and {found[1].name}", "name the file that is meant")
    if not found and stem == "train":
        raise UserError(f"{path}: holds neither train.jsonl nor train.txt", "name a folder with one, or a file")
    return found[0] if found else None


def contents(path):
    """Yield (where, content) of all that is not blank in a file, for `records.parse`.

    content  the bytes of a row, or an iterator over the text of a document, in pieces
    """
    path = Path(path)
    if _kind(path) not in KINDS:
        raise UserError(f"{path}: is neither .txt nor .jsonl", "write plain text, or one JSON object a line")
    if _kind(path) == ".jsonl":
        yield from _rows(path)
    elif any(text.strip() for text in _document(path)):
        yield str(path), _document(path)


def _kind(path):
    return path.suffix.lower()


@contextmanager
def _opened(path):
    """The file, open for reading bytes."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})", "check the path given as --data") from None


def _rows(path):
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield f"{path}:{number}", line


def _document(path):
    """Yield the text of a file in pieces.  A last CR waits for the next piece, which may begin with its LF."""
    held = ""
    for text in _decoded(path):
        text = held + text
        held = "\r" if text.endswith("\r") else ""
        yield text.removesuffix("\r").replace("\r\n", "\n")
    yield held


def _decoded(path):
    """Yield the characters of a file in pieces; one whose bytes are cut in two is in the later piece."""
    decoder, at = codecs.getincrementaldecoder("utf-8-sig")(), 0
    with _opened(path) as file:
        try:
            while data := file.read(PIECE):
                at += len(data)
                yield decoder.decode(data)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise not_utf8(path, error, at) from None
