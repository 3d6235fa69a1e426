"""Padding by length, every row in every epoch, and a batch that depends on its step alone."""

from collections import Counter

import numpy as np
import pytest

from mesp_np.data.batches import Batches, order
from mesp_np.data.rows import Row, Rows

EOS = 256


def rows(*lengths):
    """Rows of so many tokens, each ending in EOS; row i is made of the token i."""
    tokens = [np.array([i] * (length - 1) + [EOS], np.int32) for i, length in enumerate(lengths)]
    return Rows([Row(t[:-1], t[1:]) for t in tokens])


def test_padding_does_not_hide_the_end_of_text():
    """pad == eos in Qwen2.5 Base: rows of 5 and 9 tokens have 4 + 8 targets, and both last ones are eos."""
    batch = Batches(rows(5, 9), batch_size=2, seq=64).batch(0)
    assert batch.ids.shape == (2, 16) and batch.trained_tokens == 12
    short, long = sorted(batch.labels.tolist(), key=lambda labels: labels.count(-100), reverse=True)
    assert short == [0, 0, 0, EOS] + [-100] * 12
    assert long == [1] * 7 + [EOS] + [-100] * 8
    assert batch.ids.dtype == batch.labels.dtype == np.int32


@pytest.mark.parametrize("length, seq, expected", [(2, 64, 16), (17, 64, 16), (18, 64, 32), (65, 64, 64), (50, 50, 50),
                                                   (2, 9, 9)])
def test_length_is_a_multiple_of_16_at_most_seq(length, seq, expected):
    assert Batches(rows(length), 1, seq).batch(0).ids.shape == (1, expected)


def test_every_row_once_an_epoch():
    batches = Batches(rows(*[5] * 10), batch_size=4, seq=16, seed=7)
    assert batches.per_epoch == 3
    epochs = []
    for epoch in range(3):
        made = [batches.batch(3 * epoch + index) for index in range(3)]
        assert [len(batch.ids) for batch in made] == [4, 4, 2]
        epochs.append([int(row[0]) for batch in made for row in batch.ids])
        assert sorted(epochs[-1]) == list(range(10))
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_batch_depends_on_its_step_alone():
    there, back = (Batches(rows(*range(2, 40)), 3, 48, seed=1) for _ in range(2))
    forth = [there.batch(step) for step in range(30)]
    for step in reversed(range(30)):
        batch = back.batch(step)
        assert np.array_equal(batch.ids, forth[step].ids) and np.array_equal(batch.labels, forth[step].labels)


def test_order():
    assert sorted(order(0, 100, 5)) == list(range(100))
    assert len({order(epoch, 100, seed) for epoch in range(3) for seed in range(3)}) == 9


def test_more_rows_asked_for_than_there_are():
    batches = Batches(rows(5, 5), batch_size=8, seq=16)
    assert batches.per_epoch == 1 and batches.batch(4).ids.shape == (2, 16)


def test_shapes():
    made = rows(12, 402, 82, 500, 26)
    batches = Batches(made, batch_size=2, seq=512)
    assert batches.shapes(range(7)) == Counter(batches.batch(step).ids.shape for step in range(7))
    batches = Batches(made, batch_size=1, seq=512)
    shapes = batches.shapes(range(batches.per_epoch))
    assert shapes == {(1, 16): 1, (1, 416): 1, (1, 96): 1, (1, 512): 1, (1, 32): 1}
    padded = sum(B * T * count for (B, T), count in shapes.items())
    assert (padded, made.tokens) == (1072, 1017)
