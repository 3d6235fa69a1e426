"""Padding by length, every row in every epoch, packing without a seam, and a batch that depends on its step alone."""

from collections import Counter

import numpy as np
import pytest

from mesp_np.data.batches import Batches, InOrder, best_fit
from tests.small import rows

EOS = 256


def numbered(*lengths):
    """Rows of so many tokens, each ending in EOS; row i is made of the token i."""
    tokens = [[i] * (length - 1) + [EOS] for i, length in enumerate(lengths)]
    return rows([(t[:-1], t[1:]) for t in tokens])


def padded(batches):
    return sum(B * T * count for (B, T), count in batches.shapes(range(batches.per_epoch)).items())


def test_padding_does_not_hide_the_end_of_text():
    """pad == eos in Qwen2.5 Base: rows of 5 and 9 tokens have 4 + 8 targets, and both last ones are eos."""
    batch = Batches(numbered(5, 9), batch_size=2, seq=64).batch(0)
    assert batch.ids.shape == (2, 16) and batch.trained_tokens == 12
    assert batch.labels.tolist() == [[0, 0, 0, EOS] + [-100] * 12, [1] * 7 + [EOS] + [-100] * 8]
    assert batch.ids.dtype == batch.labels.dtype == np.int32


@pytest.mark.parametrize("packing", [False, True])
def test_end_of_text_in_the_middle_is_trained(packing):
    batch = Batches(rows([([5, EOS, 6], [EOS, 6, EOS])]), 1, 16, packing=packing).batch(0)
    assert batch.labels[0, :4].tolist() == [EOS, 6, EOS, -100] and batch.trained_tokens == 3


@pytest.mark.parametrize("length, seq, expected", [(2, 64, 16), (17, 64, 16), (18, 64, 32), (65, 64, 64), (50, 50, 50),
                                                   (2, 9, 9), (257, 999, 256), (258, 999, 272), (513, 999, 512),
                                                   (514, 999, 544), (996, 999, 999), (1026, 4096, 1088)])
def test_length_is_a_multiple_of_16_or_more_at_most_seq(length, seq, expected):
    assert Batches(numbered(length), 1, seq).batch(0).ids.shape == (1, expected)


@pytest.mark.parametrize("packing", [False, True])
def test_every_row_once_an_epoch(packing):
    lengths = np.random.default_rng(0).integers(2, 17, 90)
    batches = Batches(numbered(*lengths), batch_size=4, seq=16, seed=7, packing=packing)
    orders = []
    for epoch in range(3):
        made = [batches.batch(epoch * batches.per_epoch + index) for index in range(batches.per_epoch)]
        assert sorted(len(batch.ids) for batch in made)[1:] == [4] * (batches.per_epoch - 1)
        orders.append([batch.ids.tolist() for batch in made])
        inputs = Counter(np.concatenate([batch.ids[batch.labels >= 0] for batch in made]).tolist())
        assert inputs == {i: length - 1 for i, length in enumerate(lengths)}
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("packing", [False, True])
def test_a_batch_depends_on_its_step_alone(packing):
    there, back = (Batches(numbered(*range(2, 40)), 3, 48, seed=1, packing=packing) for _ in range(2))
    forth = [there.batch(step) for step in range(30)]
    for step in reversed(range(30)):
        batch = back.batch(step)
        for name in ("ids", "labels", "starts"):
            assert np.array_equal(getattr(batch, name), getattr(forth[step], name))
    other = Batches(numbered(*range(2, 40)), 3, 48, seed=2, packing=packing)
    assert any(not np.array_equal(other.batch(step).ids, forth[step].ids) for step in range(5))


def test_more_rows_asked_for_than_there_are():
    batches = Batches(numbered(5, 5), batch_size=8, seq=16)
    assert batches.per_epoch == 1 and batches.batch(4).ids.shape == (2, 16)


def test_rows_of_like_length_are_put_together():
    """Rows of 12, 402, 82, 1802 and 26 tokens: in pairs at random half would be padding."""
    made = numbered(12, 402, 82, 1802, 26)
    batches = Batches(made, batch_size=2, seq=2048)
    assert batches.shapes(range(3)) == {(2, 32): 1, (2, 416): 1, (1, 1856): 1}
    assert made.tokens == 2319 and padded(batches) == 2752
    lengths = np.random.default_rng(0).integers(2, 1025, 1000)
    batches = Batches(numbered(*lengths), batch_size=4, seq=1024, seed=3)
    assert padded(batches) < 1.08 * sum(lengths)


def test_batches_of_like_length_come_in_no_order_of_length():
    batches = Batches(numbered(*range(2, 202)), batch_size=2, seq=256)
    lengths = [batches.shape(step)[1] for step in range(batches.per_epoch)]
    assert abs(np.corrcoef(lengths, range(len(lengths)))[0, 1]) < 0.3


def test_packed_rows_begin_again_and_no_target_crosses_the_seam():
    batch = Batches(numbered(5, 4, 3), batch_size=1, seq=12, packing=True).batch(0)
    assert batch.ids.tolist() == [[0] * 4 + [1] * 3 + [2] * 2 + [0] * 3]
    assert batch.labels.tolist() == [[0, 0, 0, EOS, 1, 1, EOS, 2, EOS] + [-100] * 3]
    assert batch.starts.tolist() == [[0] * 4 + [4] * 3 + [7] * 2 + [9] * 3]
    batch.check(vocab_size=257, seq=12)


def test_the_seam_of_a_row_whose_last_token_is_not_learned():
    batch = Batches(rows([([1, 2], [2, -100]), ([3], [4])]), 1, 16, packing=True).batch(0)
    assert batch.labels[0, :4].tolist() == [2, -100, 4, -100] and batch.ids[0, :3].tolist() == [1, 2, 3]


def test_without_packing_a_row_is_one_text():
    batch = Batches(numbered(5, 9), batch_size=2, seq=64).batch(0)
    assert batch.starts.tolist() == [[0] * 4 + [4] * 12, [0] * 8 + [8] * 8]


def test_packing_fills_rows():
    lengths = np.random.default_rng(0).integers(2, 129, 500)
    batches = Batches(numbered(*lengths), batch_size=4, seq=256, packing=True)
    assert batches.units.lengths.max() <= 256 and batches.units.lengths.sum() == sum(lengths - 1)
    assert padded(batches) < 1.02 * sum(lengths)


@pytest.mark.parametrize("lengths, expected", [
    ([3, 8, 5, 2], [1, 0, 1, 2]),           # 8 alone, 5 + 3, 2
    ([4, 4, 4, 4], [0, 0, 1, 1]),
    ([6, 5, 3, 2], [0, 1, 1, 0]),           # the 2 goes where it fits best
    ([7, 6, 1], [0, 1, 0]), ([1], [0]), ([], []),
])
def test_best_fit(lengths, expected):
    assert best_fit(np.array(lengths, np.int64), 8).tolist() == expected


def test_best_fit_is_that_of_a_plain_search():
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths, seq = rng.integers(1, 30, rng.integers(1, 60)), 30
        room, expected = [], {}
        for row in np.argsort(-lengths, kind="stable"):
            fitting = [unit for unit in range(len(room)) if room[unit] >= lengths[row]]
            best = min(fitting, key=lambda unit: room[unit], default=len(room))
            room += [seq] * (best == len(room))
            room[best] -= lengths[row]
            expected[room[best]] = expected.get(room[best], 0)
        made = np.bincount(best_fit(lengths, seq), lengths)
        assert sorted(made) == sorted(seq - np.array(room))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("packing", [False, True])
def test_every_shape_of_every_epoch_is_among_the_possible_ones(size, packing):
    """More rows than are sorted together, of which the few short ones are rarely in one batch."""
    lengths, seen = np.random.default_rng(0).integers(2, 82, 300), set()
    for seed in range(5):
        batches = Batches(numbered(*lengths), size, 80, seed, packing)
        seen |= set(batches.shapes(range(5 * batches.per_epoch)))
    possible = batches.possible_shapes()
    assert seen <= possible and {B for B, _ in seen} == {B for B, _ in possible}
    assert (size, 80) in seen and len(possible) <= 2 * 5


def test_shapes_that_cannot_be():
    """Of lengths 16, 16, 32, 64 two are never 16 wide unless they are the two shortest; three never 16."""
    def possible(size):
        return Batches(numbered(17, 17, 33, 65), size, 64).possible_shapes()

    assert possible(2) == {(2, 16), (2, 32), (2, 64)} and possible(4) == possible(9) == {(4, 64)}
    assert possible(3) == {(3, 32), (3, 64), (1, 16), (1, 32), (1, 64)}


@pytest.mark.parametrize("packing", [False, True])
def test_evaluation_sees_all_rows_once(packing):
    made = numbered(*range(2, 40))
    batches = InOrder(made, 4, 64, packing)
    seen = Counter(np.concatenate([batch.ids[batch.labels >= 0] for batch in batches]).tolist())
    assert seen == {i: length - 1 for i, length in enumerate(range(2, 40))}
    assert len(list(batches)) == len(batches) and np.array_equal(batches[1].ids, list(batches)[1].ids)
    assert sum(batch.trained_tokens for batch in batches) == made.trained_tokens
    assert not InOrder(made.part(np.arange(0)), 4, 64, packing)


@pytest.mark.parametrize("packing", [False, True])
def test_the_shapes_of_an_evaluation_are_known_without_its_batches(monkeypatch, packing):
    batches = InOrder(numbered(*range(2, 40)), 4, 64, packing)
    expected = {batch.ids.shape for batch in batches}
    monkeypatch.setattr(batches.units, "batch", None)
    assert batches.shapes() == expected and len(expected) == (1 if packing else 4)
    assert InOrder(numbered(5).part(np.arange(0)), 4, 64, packing).shapes() == set()


@pytest.mark.parametrize("most, lengths", [(1, [20]), (2, [10, 30]), (4, [5, 15, 25, 35]), (0, range(1, 40)),
                                           (99, range(1, 40))])
def test_some_batches_for_evaluation_are_spread_over_the_lengths(most, lengths):
    batches = InOrder(numbered(*range(2, 41)), batch_size=1, seq=64, most=most)
    assert [batch.trained_tokens for batch in batches] == list(lengths) and len(batches) == len(lengths)
    assert {batch.ids.shape for batch in batches} == batches.shapes()
