"""Embedding: rows of a table in any stored form; ids that come twice, the first token and the last."""

import numpy as np
import pytest

from mesp_np.ops import embedding
from mesp_np.ops.quant import round_bf16
from tests import op_checks, quantised

V, D = 97, 33
IDS = np.array([0, V - 1, 5, 5, 0, *range(V)], np.int32)


@pytest.mark.parametrize("ids", [IDS, IDS[:1]], ids=["many", "one"])
def test_forward(team, rng, dtype, ids):
    table, out = op_checks.normal(rng, dtype, (V, D), (len(ids), D))
    embedding.forward(team, out, ids, table)
    op_checks.same_bits(out, table[ids])


def test_a_table_stored_in_bf16(team, rng, dtype):
    stored, out = round_bf16(rng.standard_normal((V, D))), np.empty((len(IDS), D), dtype)
    embedding.forward(team, out, IDS, stored)
    op_checks.same_bits(round_bf16(out), stored[IDS])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_table_stored_as_codes(team, rng, dtype, bits):
    stored = quantised.stored(rng.standard_normal((V, 64)).astype(np.float32), bits)
    out = np.empty((len(IDS), 64), dtype)
    embedding.forward(team, out, IDS, stored)
    op_checks.same_bits(out, quantised.widened({"table": stored}, dtype)["table"][IDS])


def test_gradient():
    op_checks.gradient("embedding", count=2)


def test_backward_sums_equal_ids_in_row_order(team, rng, dtype):
    dout, dtable = op_checks.normal(rng, dtype, (len(IDS), D), (V, D))
    expected = dtable.copy()
    np.add.at(expected, IDS, dout)
    embedding.backward(team, dtable, dout, IDS)
    op_checks.same_bits(dtable, expected)
