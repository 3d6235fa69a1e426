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
gone with the process, however that ends.
"""

import tempfile
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from mesp_np.data import records
from mesp_np.errors import LISTED, UserError
from mesp_np.ops.cross_entropy import IGNORE

HELD_OUT = 0.05


@dataclass(frozen=True)
class Row:
    """ids (n,) int32, and labels (n,) int32: the token that follows each, or -100."""

    ids: np.ndarray
    labels: np.ndarray


@dataclass
class Places:
    """Where something happened: how often, and the first places."""

    count: int = 0
    first: list = field(default_factory=list)

    def add(self, where):
        self.count += 1
        if len(self.first) < LISTED:
            self.first.append(where)


@dataclass
class Source:
    """What became of the records of one file.

    path       the file
    forms      form of record -> how many made rows
    truncated  how many records were cut
    skipped    reason -> Places of records that predict nothing
    bad        Places of rows that could not be used, with the reasons
    written    Places of texts that spell control tokens
    """

    path: str
    forms: Counter = field(default_factory=Counter)
    truncated: int = 0
    skipped: dict = field(default_factory=dict)
    bad: Places = field(default_factory=Places)
    written: Places = field(default_factory=Places)

    @property
    def has_conversations(self):
        """Whether some of the records are not plain text."""
        return any(form not in records.TEXTS for form in self.forms)

    def skip(self, reason, where):
        self.skipped.setdefault(reason, Places()).add(where)


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
    train = load_file(records.find(path), encoder, seq, max_bad_rows)
    valid = records.find(path, "valid")
    return (train, load_file(valid, encoder, seq, max_bad_rows)) if valid else hold_out(train, seed)


def load_file(path, encoder, seq, max_bad_rows=0):
    """Rows of one file, as in `load`.  Raises UserError when none can be trained, or too many are bad."""
    source, writer = Source(str(path)), Writer()
    for where, piece in records.lines(path):
        try:
            record = records.parse(where, piece)
            ids, mask = encoder.encode(record)
        except records.BadRow as error:
            source.bad.add(str(error))
            if source.bad.count > max(max_bad_rows, LISTED):
                break
            continue
        if encoder.spells_control(record):
            source.written.add(record.where)
        _append(writer, source, record, ids, mask, seq)
    if source.bad.count > max_bad_rows:
        raise _too_many(source, max_bad_rows)
    if not source.forms:
        raise _nothing(source)
    return writer.rows(source)


def hold_out(rows, seed, fraction=HELD_OUT):
    """(train, valid): a seeded choice of rows for validation, at least one; a single row stays for training."""
    count = len(rows)
    order = np.random.default_rng(seed).permutation(count)
    held = min(max(1, round(fraction * count)), count - 1)
    return rows.part(np.sort(order[held:])), rows.part(np.sort(order[:held]))


def _append(writer, source, record, ids, mask, seq):
    """Write the rows of a record, or note why there are none."""
    starts = range(0, max(1, len(ids) - 1), seq)
    if record.form != "document":
        source.truncated += len(starts) > 1
        starts = starts[:1]
    made = 0
    for start in starts:
        tokens, learned = ids[start:start + seq + 1], mask[start + 1:start + seq + 1]
        if learned.any():
            writer.add(tokens[:-1], np.where(learned, tokens[1:], IGNORE))
            made += 1
    if made:
        source.forms[record.form] += 1
    else:
        source.skip(_reason(mask, seq), record.where)


def _reason(mask, seq):
    if len(mask) < 2:
        return "fewer than two tokens"
    return f"no token to train within {seq + 1}" if mask[1:].any() else "no token to train"


def _too_many(source, allowed):
    """The error for more bad rows than are allowed; it lists the first."""
    bad = source.bad
    if bad.count == 1:
        return UserError(bad.first[0])
    more = ["and more"] if bad.count > len(bad.first) else []
    return UserError("\n  ".join([f"{source.path}: more than {allowed} bad rows; mend them, or allow more with "
                                  "--max-bad-rows", *bad.first, *more]))


def _nothing(source):
    """The error for a file of which nothing can be trained."""
    if not source.skipped and not source.bad.count:
        return UserError(f"{source.path}: is empty", "it must hold some text")
    reasons = [f"{reason}: {', '.join(places.first[:5])}" for reason, places in source.skipped.items()]
    reasons += [f"bad rows: {source.bad.count}"] * bool(source.bad.count)
    return UserError(f"{source.path}: no row can be trained ({'; '.join(reasons)})",
                     "give longer texts, or conversations with answers, or raise --seq")
