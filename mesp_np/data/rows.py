"""Rows: records as token ids with their targets.

A record becomes (ids, mask), where mask[i] says whether token i is to be predicted; for
plain text every token is.  Position t then predicts token t + 1:

    tokens       t0  t1  t2  eos          mask  -   1   1   1
    row.ids      t0  t1  t2               what the model sees
    row.labels   t1  t2  eos              -100 where the mask says no

The mask belongs to the target, not to the input, so it is shifted along with it.

    document    one long text: cut into windows of seq + 1 tokens that share one token, so
                that every token but the first is predicted once
    text        one row: what is beyond seq + 1 tokens is cut off, the end of text with it,
                since the text does not end there

A row that predicts nothing is skipped and counted: a batch of such rows has no mean loss.
"""

from dataclasses import dataclass, field

import numpy as np

from mesp_np.data import records as files
from mesp_np.errors import UserError
from mesp_np.ops.cross_entropy import IGNORE

HELD_OUT = 0.05


@dataclass(frozen=True)
class Row:
    """ids (n,) int32, and labels (n,) int32: the token that follows each, or -100."""

    ids: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Rows:
    """Rows to train or evaluate on, and what became of the others.

    truncated  how many records were cut
    skipped    reason -> where each skipped record stands
    """

    items: list
    truncated: int = 0
    skipped: dict = field(default_factory=dict)

    @property
    def tokens(self):
        """Positions, padding not counted."""
        return sum(len(row.ids) for row in self.items)

    @property
    def trained_tokens(self):
        """Positions with a target."""
        return sum(int(np.sum(row.labels != IGNORE)) for row in self.items)


def load(path, tokenizer, seq, seed=0, eos=True):
    """(train, valid) Rows of a file or folder; without a validation file, a seeded 5 % of the rows is held out.

    seq  positions in a row, at most
    eos  whether the end of text is appended
    """
    train_file, valid_file = files.find(path)
    train = make(files.read(train_file), tokenizer, seq, eos)
    return (train, make(files.read(valid_file), tokenizer, seq, eos)) if valid_file else hold_out(train, seed)


def make(records, tokenizer, seq, eos=True):
    """Rows of records.  Raises UserError when none can be trained."""
    items, truncated, skipped = [], 0, {}
    for record in records:
        ids, mask = ENCODE[record.kind](record.content, tokenizer, eos)
        pieces = _windows(ids, mask, seq)
        if record.kind != "document":
            truncated += len(pieces) > 1
            pieces = pieces[:1]
        for piece in pieces:
            reason = _reason_to_skip(*piece)
            if reason:
                skipped.setdefault(reason, []).append(record.where)
            else:
                items.append(_shifted(*piece))
    if not items:
        reasons = "; ".join(f"{reason}: {', '.join(where[:5])}" for reason, where in skipped.items())
        raise UserError(f"no row can be trained ({reasons})", "give longer texts")
    return Rows(items, truncated, skipped)


def hold_out(rows, seed, fraction=HELD_OUT):
    """(train, valid): a seeded choice of rows for validation, at least one; a single row stays for training."""
    count = len(rows.items)
    chosen = np.random.default_rng(seed).permutation(count)[:min(max(1, round(fraction * count)), count - 1)]
    held = set(chosen.tolist())
    train = [row for index, row in enumerate(rows.items) if index not in held]
    return Rows(train, rows.truncated, rows.skipped), Rows([rows.items[index] for index in sorted(held)])


def _encode_text(text, tokenizer, eos):
    ids = tokenizer.encode(text) + [tokenizer.eos_id] * eos
    return ids, [True] * len(ids)


ENCODE = {"document": _encode_text, "text": _encode_text}  # kind of record -> (ids, mask)


def _windows(ids, mask, seq):
    """Consecutive pieces of seq + 1 tokens, each beginning with the last token of the one before."""
    starts = range(0, max(1, len(ids) - 1), seq)
    return [(ids[start:start + seq + 1], mask[start:start + seq + 1]) for start in starts]


def _reason_to_skip(ids, mask):
    if len(ids) < 2:
        return "fewer than two tokens"
    return None if any(mask[1:]) else "no token to train"


def _shifted(ids, mask):
    ids = np.array(ids, np.int32)
    return Row(ids[:-1], np.where(mask[1:], ids[1:], np.int32(IGNORE)))
