"""Several texts packed into a row: each is computed as if it were alone."""

import numpy as np
import pytest

from mesp_np.batch import Batch
from mesp_np.errors import UserError
from mesp_np.ops.cross_entropy import IGNORE
from tests import small

LENGTHS = (5, 1, 7)                     # together 13, the run's seq
PADDED = (5, 1, 4)


def text(length, seed):
    """(ids, labels) of a random text."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 83, (2, length))


def packed(*texts, positions=13):
    """One row that holds the texts one after the other, and perhaps padding."""
    ids, labels, starts = np.zeros((3, 1, positions), int)
    labels[:] = IGNORE
    first = 0
    for of_ids, of_labels in texts:
        part = slice(first, first + len(of_ids))
        ids[0, part], labels[0, part], starts[0, part] = of_ids, of_labels, first
        first = part.stop
    return Batch.of(ids, labels, starts)


def alone(ids, labels):
    return Batch.of([ids], [labels])


@pytest.mark.parametrize("lengths", [LENGTHS, PADDED], ids=str)
@pytest.mark.parametrize("row_tile", [256, 3])
@pytest.mark.parametrize("method", small.EXACT)
def test_loss_and_gradients_are_those_of_the_texts_alone(lengths, method, row_tile):
    texts = [text(length, seed) for seed, length in enumerate(lengths)]
    with small.engine(dtype="float64", method=method, row_tile=row_tile) as engine:
        whole, gradients = engine.evaluate(packed(*texts)), engine.gradients(packed(*texts))
        parts = [engine.evaluate(alone(*each)) for each in texts]
        sums = [{name: len(each[0]) * grad for name, grad in engine.gradients(alone(*each)).items()} for each in texts]
    assert whole[0] == pytest.approx(sum(loss for loss, _ in parts), rel=1e-13)
    assert whole[1] == sum(hits for _, hits in parts)
    for name, grad in gradients.items():
        expected = sum(part[name] for part in sums) / sum(lengths)
        np.testing.assert_allclose(grad, expected, rtol=1e-10, atol=1e-13)


def test_without_starts_the_texts_would_see_each_other():
    """The negative control of the test above."""
    texts = [text(length, seed) for seed, length in enumerate(LENGTHS)]
    batch = packed(*texts)
    with small.engine(dtype="float64") as engine:
        apart, _ = engine.evaluate(batch)
        together, _ = engine.evaluate(Batch.of(batch.ids, batch.labels))
    assert abs(apart - together) > 1e-3


def test_changing_a_text_changes_no_bit_of_its_neighbours():
    first, second, third = (text(length, seed) for seed, length in enumerate(LENGTHS))
    other = text(1, 9)
    unseen = first[0], np.full(5, IGNORE)                        # the neighbours' losses alone
    with small.engine() as engine:
        before, after = (engine.evaluate(packed(unseen, middle, third))[0] for middle in (
            (second[0], [IGNORE]), (other[0], [IGNORE])))
        gradients = [engine.gradients(packed(unseen, (middle, [IGNORE]), third)) for middle in (second[0], other[0])]
    assert before == after and second[0] != other[0]
    for name, grad in gradients[0].items():
        assert grad.tobytes() == gradients[1][name].tobytes()


def test_packed_rows_take_the_planned_events():
    texts = [text(length, seed) for seed, length in enumerate(LENGTHS)]
    with small.engine(batch_size=1) as engine:
        engine.step([packed(*texts)], rate=0.1)
        assert engine.arena.ledger.live_peak == engine.plan.live_peak_bytes
        assert len(engine.arena.ledger.events) == len(engine.plan.ledger.events)


@pytest.mark.parametrize("starts", [[[0, 2, 1]], [[0, -1, 0]], [[0, 0]]], ids=str)
def test_starts_that_make_no_sense_are_refused(starts):
    with small.engine() as engine, pytest.raises(UserError, match="start"):
        engine.step([Batch.of([[1, 2, 3]], [[2, 3, 4]], starts)], rate=0.1)
