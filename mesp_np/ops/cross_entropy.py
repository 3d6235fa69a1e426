"""Cross entropy: how surprised the model is by the token that came.

Shapes    logits, dlogits : (C, V)    C rows, V tokens; or (C, W), a tile of W columns of them
          labels          : (C,)      the token that follows each row
          losses          : (C,)      loss of each row
          hits            : (C,)      1 where no token is likelier than the label, else 0
          largest, total  : (C,)      running maximum and sum of exponentials of a row
          shrink          : (C,)      by what a new maximum makes older sums smaller
          dx, target      : (C, D)    gradient of the head's input; rows W_label of its weight (V, D)

Forward   m_c    = max_v logits_cv
          lse_c  = m_c + log sum_v exp(logits_cv - m_c)
          loss_c = lse_c - logits_{c, label_c}
          L      = scale sum_c loss_c,   scale = 1 / (number of trained tokens)

Backward  d lse_c / d logits_cv = exp(logits_cv - lse_c), the softmax, and the label's logit
          enters with factor -1:
              dlogits_cv = scale (exp(logits_cv - lse_c) - [v = label_c]).
          It needs no upstream gradient (L is the last thing computed) and is written over
          the logits at once.

Tiles     Over the vocabulary: `accumulate` updates the maximum and the sum tile by tile.  When
          a tile raises the maximum from m to m', what was summed so far is multiplied by
          shrink = exp(m - m').  logits = x W^T of a frozen head need no second look, since
              dx_c = sum_v dlogits_cv W_v = scale (sum_v e_cv W_v / sum_v e_cv - W_label),
              e_cv = exp(logits_cv - m_c):
          the tile of e that `accumulate` leaves behind is multiplied with its tile of W at
          once, the sum shrinks along (`shrink_rows`), and `combine` ends it.  A head that is
          trained needs dlogits itself for dW = dlogits^T x: then each tile of logits is formed
          once more and `gradient_tile` turns it into dlogits.

Saved      nothing: the gradient, or e, replaces the logits
Recomputed with a trained head in the tiled form, the logits: 2 C V D FLOPs
Cost       about 4 C V FLOPs forward, 3 C V backward

Rows whose label is -100 never get here: they have no loss, no gradient and no logits.
Sums over a row, or over a row's part in a tile, run in float64.

Source    transformers' causal LM loss: float32 logits, ignore_index -100, sum over tokens
          divided by their number; running maximum: Milakov and Gimelshein, arXiv 1805.02867;
          the sum that shrinks along: as in attention by tiles, Rabe and Staats, arXiv 2112.05682.
"""

import math

from mesp_np.ops import expect, kernel
from mesp_np.ops.rowmath import exp, total_exp
from mesp_np.ops.rowmath import largest as largest_of
from mesp_np.ops.rowmath import total as total_of

IGNORE = -100


def forward(team, losses, hits, logits, labels):
    """losses and hits (C,) from whole rows of logits (C, V)."""
    expect(logits.shape[:1], losses=losses, hits=hits, labels=labels)
    team.rows(_forward, losses, hits, logits, labels, width=logits.shape[1], flops=4)


def backward(team, logits, losses, hits, labels, scale):
    """losses and hits (C,), and dlogits (C, V) in place of logits."""
    expect(logits.shape[:1], losses=losses, hits=hits, labels=labels)
    team.rows(_backward, logits, losses, hits, labels, logits.dtype.type(scale), flops=7)


def accumulate(team, logits, largest, total, shrink, losses, labels, first):
    """Take in a tile: logits (C, W) of tokens first .. first + W - 1 become exp(logits - largest).

    Before the first tile largest is -inf and total 0; losses collects -logits[label].
    """
    expect(logits.shape[:1], largest=largest, total=total, shrink=shrink, losses=losses, labels=labels)
    team.rows(_accumulate, logits, largest, total, shrink, losses, labels, first, flops=4)


def shrink_rows(team, dx, shrink):
    """dx (C, D), a sum under an older maximum, under the present one."""
    expect(dx.shape[:1], shrink=shrink)
    team.rows(_shrink_rows, dx, shrink, flops=1)


def combine(team, dx, target, total, scale):
    """dx (C, D) from the sum of e W after the last tile: scale (dx / total - target)."""
    expect(dx.shape, target=target)
    expect(dx.shape[:1], total=total)
    team.rows(_combine, dx, target, total, dx.dtype.type(scale), flops=3)


def finish(team, losses, hits, largest, total):
    """After the last tile: losses (C,) += lse, and hits (C,); largest becomes lse."""
    expect(losses.shape, hits=hits, largest=largest, total=total)
    team.rows(_finish, losses, hits, largest, total, flops=3)


def gradient_tile(team, logits, lse, labels, first, scale):
    """dlogits in place of a tile of logits (C, W) of tokens first .. first + W - 1."""
    expect(logits.shape[:1], lse=lse, labels=labels)
    team.rows(_gradient_tile, logits, lse, labels, first, logits.dtype.type(scale), flops=3)


def sum_losses(team, total, losses):
    """total (1,) in float64 = sum of losses, in order."""
    expect((1,), total=total)
    team.run(total, 1, lambda *_: _sum(total, losses), flops=losses.size)


@kernel
def _forward(losses, hits, logits, labels, start, stop):
    for c in range(start, stop):
        label, top = logits[c, labels[c]], largest_of(logits[c])
        losses[c] = top + math.log(total_exp(logits[c], top)) - label
        hits[c] = label == top


@kernel
def _backward(logits, losses, hits, labels, scale, start, stop):
    for c in range(start, stop):
        row = logits[c]
        label = row[labels[c]]
        top = largest_of(row)
        hits[c] = label == top
        for v in range(len(row)):
            row[v] = exp(row[v] - top)
        sums = total_of(row)
        losses[c] = top + math.log(sums) - label
        factor = logits.dtype.type(scale / sums)
        for v in range(len(row)):
            row[v] *= factor
        row[labels[c]] -= scale


@kernel
def _accumulate(logits, largest, total, shrink, losses, labels, first, start, stop):
    for c in range(start, stop):
        row = logits[c]
        if first <= labels[c] < first + len(row):
            losses[c] -= row[labels[c] - first]
        top = max(largest[c], largest_of(row))
        for v in range(len(row)):
            row[v] = exp(row[v] - top)
        shrink[c] = math.exp(largest[c] - top)
        largest[c], total[c] = top, total[c] * shrink[c] + total_of(row)


@kernel
def _shrink_rows(dx, shrink, start, stop):
    for c in range(start, stop):
        if shrink[c] != 1:                           # by which the bits would stay
            for d in range(dx.shape[1]):
                dx[c, d] *= shrink[c]


@kernel
def _combine(dx, target, total, scale, start, stop):
    for c in range(start, stop):
        for d in range(dx.shape[1]):
            dx[c, d] = scale * (dx[c, d] / total[c] - target[c, d])


@kernel
def _finish(losses, hits, largest, total, start, stop):
    for c in range(start, stop):
        hits[c] = losses[c] == -largest[c]
        largest[c] += math.log(total[c])
        losses[c] += largest[c]


@kernel
def _gradient_tile(logits, lse, labels, first, scale, start, stop):
    for c in range(start, stop):
        for v in range(logits.shape[1]):
            logits[c, v] = scale * exp(logits[c, v] - lse[c])
        if first <= labels[c] < first + logits.shape[1]:
            logits[c, labels[c] - first] -= scale


@kernel
def _sum(total, losses):
    total[0] = 0.0
    for c in range(len(losses)):
        total[0] += losses[c]
