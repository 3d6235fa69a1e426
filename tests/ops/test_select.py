"""Row selection: every row, some, one and none."""

import numpy as np
import pytest

from mesp_np.ops import select
from mesp_np.ops.cross_entropy import IGNORE
from tests import op_checks

every_choice = pytest.mark.parametrize("chosen", [range(7), [1, 4, 5], [6], []], ids=str)


def find(team, chosen):
    """rows and targets of a batch of seven where row n has label 10 n, or none."""
    labels = np.array([10 * n if n in chosen else IGNORE for n in range(7)], np.int32)
    rows, targets = np.full((2, 7), -1, np.int32)
    select.find(team, rows, targets, labels, IGNORE)
    return labels, rows, targets


@every_choice
def test_find(team, chosen):
    _, rows, targets = find(team, chosen)
    rest = [-1] * (7 - len(chosen))
    assert rows.tolist() == [*chosen] + rest and targets.tolist() == [10 * n for n in chosen] + rest


@every_choice
def test_forward(team, rng, dtype, chosen):
    x, out = op_checks.normal(rng, dtype, (7, 33), (len(chosen), 33))
    _, rows, _ = find(team, chosen)
    select.forward(team, out, x, rows[:len(chosen)])
    op_checks.same_bits(out, x[[*chosen]])


def test_gradient():
    op_checks.gradient("select", count=3)


@every_choice
def test_backward_and_clear(team, rng, dtype, chosen):
    """Chosen rows take their gradient, the others are cleared: together, the gradient of the choice."""
    dx, dchosen = op_checks.normal(rng, dtype, (7, 33), (len(chosen), 33))
    labels, rows, _ = find(team, chosen)
    select.backward(team, dx, dchosen, rows[:len(chosen)])
    select.clear_ignored(team, dx, labels, IGNORE)
    expected = np.zeros_like(dx)
    expected[[*chosen]] = dchosen
    op_checks.same_bits(dx, expected)
