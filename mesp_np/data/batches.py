"""Batches: rows put together, padded, in an order that depends on the seed and the step alone.

Step s of a run always sees the same batch, so a resumed run needs to know nothing but s.
No row is left out of an epoch, and none comes twice:

    1  a seeded permutation of the rows
    2  cut into windows of 16 batches, each sorted by length: rows of a batch are of a kind
    3  cut into batches (the last may be smaller), which are permuted again

Rows of a batch are padded to the longest, rounded up to a multiple of 16 (beyond 512 of 32, beyond
1024 of 64, and so on) so that few shapes occur and each can be planned.  Padding is known by
length, never by a token id: in Qwen2.5 Base the padding token is the end of text itself, which
must be trained.  Padding follows the row, where causal attention hides it, and has no target.

Packing puts several rows into one, whole, up to seq positions:

    row        a0 a1 a2 b0 b1 -  -  -        - is padding
    labels     a1 a2 a3 b1 b2 -100 ...       each row's own last label: none crosses the seam
    starts     0  0  0  3  3  5  5  5        where the row of each position begins

Positions begin again at a start, and attention does not look before it (`batch.Batch`), so
packed rows, and padding, cannot see each other.  Which rows go together is decided once, by their lengths:
the longest first, each into the fullest row that still has room (best fit decreasing).
"""

from array import array
from collections import Counter

import numpy as np

from mesp_np.batch import Batch
from mesp_np.ops.cross_entropy import IGNORE

MULTIPLE, FINE = 16, 512        # of positions, up to a length of FINE
WINDOW = 16                     # batches that are sorted by length together


class Units:
    """What a batch is made of: single rows, or rows packed together.

    lengths  (units,) positions in each
    """

    def __init__(self, rows, seq, packing=False):
        self.rows, self.seq, self.packed = rows, seq, packing
        unit = best_fit(rows.lengths, seq) if packing else np.arange(len(rows))
        self._members = np.argsort(unit, kind="stable")                    # rows, unit after unit
        self._first = np.append(0, np.cumsum(np.bincount(unit)))           # where a unit's rows begin among them
        self.lengths = np.bincount(unit, rows.lengths).astype(np.int64)

    def __len__(self):
        return len(self.lengths)

    def shape(self, chosen):
        """(B, T) of a batch of these units."""
        return len(chosen), int(self.padded(self.lengths[chosen].max()))

    def padded(self, lengths):
        """T of a batch whose longest unit has this length, for one or many."""
        doublings = np.ceil(np.log2(np.maximum(lengths, FINE) / FINE)).astype(np.int64)
        grain = MULTIPLE << doublings
        return np.minimum(-(-lengths // grain) * grain, self.seq)

    def batch(self, chosen):
        """The Batch of these units."""
        B, T = self.shape(chosen)
        ids = np.zeros((B, T), np.int32)                # (B, T)
        labels = np.full((B, T), IGNORE, np.int32)      # (B, T)
        starts = np.zeros((B, T), np.int32)             # (B, T)
        for b, unit in enumerate(chosen):
            at = 0
            for member in self._members[self._first[unit]:self._first[unit + 1]]:
                row = self.rows.row(member)
                stop = at + len(row.ids)
                ids[b, at:stop], labels[b, at:stop] = row.ids, row.labels
                starts[b, at:] = at
                at = stop
            starts[b, at:] = at
        return Batch.of(ids, labels, starts)


class Batches:
    """Rows, `batch_size` units at a time, of at most `seq` positions: batch(0), batch(1), ... without end."""

    def __init__(self, rows, batch_size, seq, seed=0, packing=False):
        self.units, self.batch_size, self.seed = Units(rows, seq, packing), batch_size, seed
        self.per_epoch = -(-len(self.units) // batch_size)
        self._epoch, self._order = None, None

    def batch(self, step):
        """The Batch of a step, counted from 0 over all epochs."""
        return self.units.batch(self._chosen(step))

    def shape(self, step):
        """(B, T) of a step's batch."""
        return self.units.shape(self._chosen(step))

    def shapes(self, steps):
        """Shape (B, T) -> how often it occurs, over an iterable of steps."""
        return Counter(map(self.shape, steps))

    def possible_shapes(self):
        """Every shape (B, T) that some epoch may have: the longest of B units is at least the Bth of all by length."""
        padded = self.units.padded(np.sort(self.units.lengths))
        full, rest = min(self.batch_size, len(padded)), len(padded) % self.batch_size
        return {(B, int(T)) for B in (full, rest or full) for T in np.unique(padded[B - 1:])}

    def _chosen(self, step):
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, order(self.units.lengths, self.batch_size, [self.seed, epoch])
        units, batches = self._order
        first = batches[index] * self.batch_size
        return units[first:first + self.batch_size]


class InOrder:
    """Rows for evaluation, each once: a sequence of batches, by length so that little is padded.

    most  of all batches so many, evenly spread over the lengths; 0: all
    """

    def __init__(self, rows, batch_size, seq, packing=False, most=0):
        self.units, self.batch_size = Units(rows, seq, packing), batch_size
        self._order = np.argsort(self.units.lengths, kind="stable")
        count = -(-len(self.units) // batch_size)
        taken = min(most or count, count)
        self._batches = (2 * np.arange(taken) + 1) * count // (2 * max(taken, 1))      # the middles of equal spans

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.units.batch(self._chosen(index))

    def shapes(self):
        """The shapes (B, T) that occur, known without making a batch."""
        return {self.units.shape(self._chosen(index)) for index in range(len(self))}

    def _chosen(self, index):
        first = self._batches[index] * self.batch_size
        return self._order[first:first + self.batch_size]


def order(lengths, batch_size, seed):
    """(units, batches) of an epoch: the units in their order, and in which order to take the batches cut from them."""
    rng = np.random.default_rng(seed)
    units = rng.permutation(len(lengths))
    for first in range(0, len(units), WINDOW * batch_size):
        window = units[first:first + WINDOW * batch_size]
        window[:] = window[np.argsort(lengths[window], kind="stable")]
    return units, rng.permutation(-(-len(units) // batch_size))


def best_fit(lengths, seq):
    """Which unit each row goes into, (rows,) int32: the longest row first, into the fullest unit with room for it.

    A set bit r of `spaces` says that some unit has room for r more; top[r] is the last such unit and below[unit] the
    one before it, so a row is placed without a search through the units.
    """
    unit_of = np.empty(len(lengths), np.int32)
    spaces, top, below = 0, [-1] * (seq + 1), array("i")
    for row in np.argsort(-lengths, kind="stable"):
        length = int(lengths[row])
        roomy = spaces >> length
        if roomy:
            space = length + (roomy & -roomy).bit_length() - 1
            unit = top[space]
            top[space] = below[unit]
            if top[space] < 0:
                spaces ^= 1 << space
        else:
            space, unit = seq, len(below)
            below.append(-1)
        unit_of[row] = unit
        space -= length
        below[unit], top[space] = top[space], unit
        spaces |= 1 << space
    return unit_of
