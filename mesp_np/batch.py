"""A batch: token rows and their targets, checked before any kernel sees them."""

from dataclasses import dataclass

import numpy as np

from mesp_np.errors import UserError
from mesp_np.ops.cross_entropy import IGNORE

PIECE = 2048            # numbers looked at together: a step must not allocate an array as large as the batch


@dataclass(frozen=True)
class Batch:
    """Token rows and their targets, all int32.

    ids             (B, T) token ids
    labels          (B, T) the token that follows each position, -100 where there is no loss
    starts          (B, T) where in its row the text of each position begins: 0, or more when
                    several texts are packed into a row, which then do not see each other
    trained_tokens  positions with a loss
    """

    ids: np.ndarray
    labels: np.ndarray
    starts: np.ndarray
    trained_tokens: int

    @classmethod
    def of(cls, ids, labels, starts=None):
        """From whole numbers of any kind, of shape (B, T); without `starts` a row is one text."""
        ids, labels = _int32("ids", ids), _int32("labels", labels)
        starts = np.zeros(ids.shape, np.int32) if starts is None else _int32("starts", starts)
        return cls(ids, labels, starts, int(np.sum(np.not_equal(labels, IGNORE))))

    @classmethod
    def phantom(cls, shape):
        """For planning: a shape (B, T), every position with a loss, and no memory."""
        zeros = np.broadcast_to(np.int32(0), shape)
        return cls(zeros, zeros, zeros, shape[0] * shape[1])

    def check(self, vocab_size, seq):
        """Raise UserError for what no kernel may see: numbers out of their range, rows too long, no target."""
        shapes = {self.ids.shape, self.labels.shape, self.starts.shape}
        if self.ids.ndim != 2 or len(shapes) > 1 or self.ids.shape[1] > seq:
            raise UserError(f"batch: ids, labels and starts have shapes {', '.join(map(str, sorted(shapes)))}",
                            f"all must be (B, T) with T at most {seq}, the run's seq")
        trained = _extremes(self.labels, IGNORE)
        if not trained:
            raise UserError("batch: every label is -100", "leave out rows that predict nothing")
        for name, (low, high) in (("ids", _extremes(self.ids)), ("labels", trained)):
            if not 0 <= low <= high < vocab_size:
                raise UserError(f"batch: {name} hold {low} to {high}, the model has {vocab_size} tokens",
                                "use the tokenizer that belongs to the model")
        T = self.ids.shape[1]
        if any(np.any((part < 0) | (part > np.arange(at, at + len(part)) % T)) for at, part in _parts(self.starts)):
            raise UserError("batch: a position stands before the start of its text", "starts[b, t] is at most t")


def _int32(name, values):
    values = np.asarray(values)
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    if values.dtype.kind not in "iu" or low < -1 << 31 or high >= 1 << 31:
        raise UserError(f"batch: {name} are {values.dtype}, from {low} to {high}", "give whole numbers of 32 bits")
    return values.astype(np.int32, copy=False)


def _parts(values):
    """Yield (at, part): an array as one row, some numbers at a time."""
    flat = values.reshape(-1)
    for at in range(0, flat.size, PIECE):
        yield at, flat[at:at + PIECE]


def _extremes(values, ignored=None):
    """(lowest, highest) of an integer array, `ignored` left out; None when nothing is left."""
    found = []
    for _, part in _parts(values):
        left = part if ignored is None else part[part != ignored]
        found += [int(left.min()), int(left.max())] if left.size else []
    return (min(found), max(found)) if found else None
