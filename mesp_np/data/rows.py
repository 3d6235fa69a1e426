"""Rows: records as token ids with their targets.

A record becomes (ids, mask), where mask[i] says whether token i is to be predicted
(`data.encode`).  Position t then predicts token t + 1:

    tokens       t0  t1  t2  eos          mask  -   0   1   1
    row.ids      t0  t1  t2               what the model sees
    row.labels  -100 t2  eos              -100 where the mask says no

The mask belongs to the target, not to the input, so it is shifted along with it.

    document    one long text: cut into windows of seq + 1 tokens that share one token, so
                that every token but the first is predicted once
    others      one row: what is beyond seq + 1 tokens is cut off, the end of text with it,
                since the text does not end there

A row that predicts nothing is skipped and counted: a batch of such rows has no mean loss.

Tokens are never all in memory.  One pass over the file appends ids and labels of each row to
a temporary file (in TMPDIR, 8 bytes a position), which is then mapped; of a row, memory holds
the place, the length and the number of targets, 16 bytes.  The file has no name, so it is
gone with the process, however that ends.  A document is read and encoded a part at a time,
and its windows are written as they come; only a tokenizer that must see all of a text at once
(`checkpoint.tokenizer`) takes it whole, at some 500 bytes a token.
"""

import tempfile
from array import array
from dataclasses import dataclass, replace

import numpy as np

from mesp_np.data import files, records
from mesp_np.data.source import Source
from mesp_np.errors import LISTED, UserError
from mesp_np.ops.cross_entropy import IGNORE

HELD_OUT = 0.05
TOO_SHORT = "fewer than two tokens"


@dataclass(frozen=True)
class Row:
    """ids (n,) int32, and labels (n,) int32: the token that follows each, or -100."""

    ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Rows:
    """Rows to train or evaluate on; indexed by a whole number, or by an array of them for some of the rows.

    data     (2 x positions,) int32, mapped: ids of a row, then its labels
    starts   (rows,) int64, where in data each row begins
    lengths  (rows,) int32, positions in each row
    targets  (rows,) int32, positions with a target in each row
    source   what became of the file's records, of which these rows may be a part
    """

    data: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    source: Source

    def __len__(self):
        return len(self.lengths)

    def row(self, index):
        """The Row with an index."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        return Row(self.data[start:start + length], self.data[start + length:start + 2 * length])

    def part(self, indices):
        """Rows of the same file with these indices."""
        return replace(self, starts=self.starts[indices], lengths=self.lengths[indices], targets=self.targets[indices])

    @property
    def tokens(self):
        """Positions, padding not counted."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def trained_tokens(self):
        """Positions with a target."""
        return int(self.targets.sum(dtype=np.int64))


class Writer:
    """Rows on their way into the temporary file."""

    def __init__(self):
        self._file = tempfile.TemporaryFile(prefix="mesp_np-")
        self._lengths, self._targets = array("i"), array("i")

    def add(self, ids, labels):
        """Append a row: ids (n,) and labels (n,)."""
        try:
            for values in (ids, labels):
                self._file.write(np.ascontiguousarray(values, np.int32))
        except OSError as error:
            raise UserError(f"{tempfile.gettempdir()}: tokens cannot be written ({error.strerror})",
                            "name a folder with more room in TMPDIR") from None
        self._lengths.append(len(ids))
        self._targets.append(int(np.sum(np.not_equal(labels, IGNORE))))

    def rows(self, source):
        """The Rows that were added, at least one."""
        self._file.flush()
        lengths, targets = (np.array(values, np.int32) for values in (self._lengths, self._targets))
        starts = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
        return Rows(np.memmap(self._file, np.int32, "r"), starts, lengths, targets, source)


def load(path, encoder, seq, seed=0, max_bad_rows=0):
    """(train, valid) Rows of a file or folder; without a validation file, a seeded 5 % of the rows is held out.

    encoder       data.encode.Encoder
    seq           positions in a row, at most
    max_bad_rows  how many rows that cannot be used are skipped; one more is an error
    """
    train = load_file(files.find(path), encoder, seq, max_bad_rows)
    valid = files.find(path, "valid")
    return (train, load_file(valid, encoder, seq, max_bad_rows)) if valid else hold_out(train, seed)


def load_file(path, encoder, seq, max_bad_rows=0):
    """Rows of one file, as in `load`.  Raises UserError when none can be trained, or too many are bad."""
    source, writer = Source(str(path)), Writer()
    for where, content in files.contents(path):
        try:
            record = records.parse(where, content)
            write = _text if record.form in records.TEXTS else _conversation
            if reason := write(writer, source, record, encoder, seq):
                source.skip(reason, where)
            else:
                source.forms[record.form] += 1
        except records.BadRow as error:
            source.bad.add(str(error))
            if source.bad.count > max(max_bad_rows, LISTED):
                break
    source.check(max_bad_rows)
    return writer.rows(source)


def hold_out(rows, seed, fraction=HELD_OUT):
    """(train, valid): a seeded choice of rows for validation, at least one; a single row stays for training."""
    count = len(rows)
    order = np.random.default_rng(seed).permutation(count)
    held = min(max(1, round(fraction * count)), count - 1)
    return rows.part(np.sort(order[held:])), rows.part(np.sort(order[:held]))


def _text(writer, source, record, encoder, seq):
    """Write the windows of a text while it is encoded, of a row the first alone.  Returns why there are none, or ""."""
    is_row, written = record.form == "text", False
    windows = _windows(encoder.stream(record), seq)
    for index, (tokens, spells) in enumerate(list(windows) if is_row else windows):     # a bad row raises here
        written = written or spells
        if len(tokens) > 1 and not (is_row and index):
            writer.add(tokens[:-1], tokens[1:])
    source.truncated += is_row and index > 0
    if written:
        source.written.add(record.where)
    return "" if len(tokens) > 1 else TOO_SHORT


def _windows(parts, seq):
    """Yield (tokens, spells) of windows of seq + 1 tokens, each beginning with the last token of the one before.

    parts   (ids (n,), whether they spell a control token) of a text, part by part
    tokens  (seq + 1,) ids; fewer in the last window, which has less than two only when it is the first
    spells  whether a control token is spelled so far
    """
    held, spells = np.empty(0, np.int32), False
    for ids, spelled in parts:
        held, spells = np.append(held, ids), spells or spelled
        while len(held) > seq + 1:
            yield held[:seq + 1], spells
            held = held[seq:]
    yield held, spells


def _conversation(writer, source, record, encoder, seq):
    """Write the row of a conversation.  Returns why there is none, or ""."""
    ids, mask = encoder.encode(record)
    tokens, learned = ids[:seq + 1], mask[1:seq + 1]
    source.truncated += len(ids) > len(tokens)
    if encoder.mask_prompt and record.begins_with_answer:
        source.unasked.add(record.where)
    if learned.any():
        writer.add(tokens[:-1], np.where(learned, tokens[1:], IGNORE))
        return ""
    if len(ids) < 2:
        return TOO_SHORT
    return f"no token to train within {seq + 1}" if mask[1:].any() else "no token to train"
