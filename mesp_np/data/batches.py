"""Batches: rows put together, padded, in an order that depends on the seed and the step alone.

Step s of a run always sees the same batch, so a resumed run needs to know nothing but s.
An epoch is a seeded permutation of the rows, cut into batches; the last may be smaller,
and no row is left out.

Rows of a batch are padded to the longest, rounded up to a multiple of 16 so that few
shapes occur and each can be planned.  Padding is known by length, never by a token id: in
Qwen2.5 Base the padding token is the end of text itself, which must be trained.  Padding
follows the row, where causal attention hides it, and has no target.
"""

from collections import Counter
from functools import lru_cache

import numpy as np

from mesp_np.model import Batch
from mesp_np.ops.cross_entropy import IGNORE

MULTIPLE = 16


class Batches:
    """Rows, `batch_size` at a time, of at most `seq` positions: batch(0), batch(1), ... without end."""

    def __init__(self, rows, batch_size, seq, seed=0):
        self.rows, self.batch_size, self.seq, self.seed = rows.items, batch_size, seq, seed
        self.per_epoch = -(-len(self.rows) // batch_size)

    def batch(self, step):
        """The Batch of a step, counted from 0 over all epochs."""
        rows, (B, T) = self._chosen(step), self.shape(step)
        ids = np.zeros((B, T), np.int32)                # (B, T)
        labels = np.full((B, T), IGNORE, np.int32)      # (B, T)
        for b, row in enumerate(rows):
            ids[b, :len(row.ids)] = row.ids
            labels[b, :len(row.ids)] = row.labels
        return Batch.of(ids, labels)

    def shape(self, step):
        """(B, T) of a step's batch."""
        rows = self._chosen(step)
        longest = max(len(row.ids) for row in rows)
        return len(rows), min(-(-longest // MULTIPLE) * MULTIPLE, self.seq)

    def shapes(self, steps):
        """Shape (B, T) -> how often it occurs, over an iterable of steps."""
        return Counter(map(self.shape, steps))

    def _chosen(self, step):
        epoch, index = divmod(step, self.per_epoch)
        first = index * self.batch_size
        return [self.rows[i] for i in order(epoch, len(self.rows), self.seed)[first:first + self.batch_size]]


@lru_cache(maxsize=2)
def order(epoch, count, seed):
    """The rows of an epoch in their order: a permutation of range(count), as a tuple."""
    return tuple(np.random.default_rng([seed, epoch]).permutation(count).tolist())
