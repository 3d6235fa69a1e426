"""Embedding: look up a row of the table for each token.

Shapes    ids       : (N,)      token ids in [0, V); Batch.check sees to it
          table     : (V, D)    any stored form when frozen, quantised too
          out, dout : (N, D)
          dtable    : (V, D)

Forward   out_nd = table_{ids_n, d}

Backward  Row v of the table reaches every position where its token stands, with factor one:
              dtable_vd = sum over n with ids_n = v of dout_nd        (scatter-add)

Saved      ids (N,)
Recomputed nothing
Cost       no FLOPs forward, N D additions backward

Source    Bengio et al., A Neural Probabilistic Language Model, 2003: a row for each word.

The scatter-add runs over columns, not rows: two equal ids then never meet in two
workers, and the order of the sum is the order of the rows.
"""


from mesp_np.ops import expect, kernel
from mesp_np.ops.quant import widen

ROWS = 64               # rows looked up in one tile


def forward(team, out, ids, table):
    """out (N, D) = rows of table (V, D); each row is made dense on its own."""
    expect(out.shape[:1], ids=ids)
    expect((len(table), out.shape[1]), table=table)

    def task(_, tile):
        for n in range(tile * ROWS, min(len(ids), (tile + 1) * ROWS)):
            widen(out[n:n + 1], table[ids[n]:ids[n] + 1])

    team.run(out, -(-len(ids) // ROWS), task, flops=0)


def backward(team, dtable, dout, ids):
    """dtable (V, D) += dout (N, D), each row at its token's place."""
    expect(dout.shape[:1], ids=ids)
    expect(dtable.shape[1:], row=dout[0])
    team.rows(_scatter_add, dtable.T, dout, ids, width=len(ids), flops=1)


@kernel
def _scatter_add(dtable_columns, dout, ids, start, stop):
    for n in range(len(ids)):
        for d in range(start, stop):
            dtable_columns[d, ids[n]] += dout[n, d]
