"""Row selection: only the rows that have a label go to the head.

Shapes    x, dx         : (N, D)
          chosen, dchosen : (C, D)
          rows          : (C,)      different row numbers, in [0, N)

Forward   chosen_c = x_{rows_c}

Backward  A row that was chosen has factor one, a row that was not has none:
              dx_{rows_c} = dchosen_c,   and zero elsewhere.

Saved      rows (C,)
Recomputed nothing
Cost       no FLOPs

Source    ignore_index of the transformers causal LM loss: such rows add nothing to loss or gradient.
"""


from mesp_np.ops import expect, kernel


def find(team, rows, targets, labels, ignore):
    """The first entries of rows and targets (N,) = row number and label of each label that is not `ignore`."""
    expect(labels.shape, rows=rows, targets=targets)
    team.run(rows, 1, lambda *_: _find(rows, targets, labels, ignore), flops=0)


def forward(team, chosen, x, rows):
    """chosen (C, D) = x[rows]."""
    expect(chosen.shape[:1], rows=rows)
    expect(chosen.shape[1:], row=x[0])
    team.rows(_gather, chosen, x, rows, flops=0)


def backward(team, dx, dchosen, rows):
    """dx[rows] = dchosen (C, D); other rows are left alone."""
    expect(dchosen.shape[:1], rows=rows)
    expect(dchosen.shape[1:], row=dx[0])
    team.run(dx, 1, lambda *_: _scatter(dx, dchosen, rows), flops=0)


def clear_ignored(team, dx, labels, ignore):
    """dx (N, D) = 0 where labels (N,) == ignore."""
    expect(dx.shape[:1], labels=labels)
    team.rows(_clear, dx, labels, ignore, flops=0)


@kernel
def _find(rows, targets, labels, ignore):
    count = 0
    for n in range(len(labels)):
        if labels[n] != ignore:
            rows[count], targets[count] = n, labels[n]
            count += 1


@kernel
def _gather(chosen, x, rows, start, stop):
    for c in range(start, stop):
        for d in range(chosen.shape[1]):
            chosen[c, d] = x[rows[c], d]


@kernel
def _scatter(dx, dchosen, rows):
    for c in range(len(rows)):
        for d in range(dx.shape[1]):
            dx[rows[c], d] = dchosen[c, d]


@kernel
def _clear(dx, labels, ignore, start, stop):
    for n in range(start, stop):
        if labels[n] == ignore:
            for d in range(dx.shape[1]):
                dx[n, d] = 0
