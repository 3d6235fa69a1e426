"""The methods: what each keeps of a block, and which driver runs it.

An exact method is a set of names and a flag: are blocks checkpointed, or is everything
kept for all of them at once?  MeZO has a driver of its own.  To add a method, write a
file with a KEEP set and its table, and enter it here.

Each file gives its live peak as a closed formula, in elements beyond what all methods
share.  The formulas are evaluated by tests/test_formulas.py against the ledger, to the byte, for
the Qwen2.5 shapes.  They name the moments that can be the peak when H*E = D, F >= 2 D, R is well
below D, and the weights are stored in another dtype than the run's (else there is no weight tile).
Letters: L layers, N = B*T rows, D width, F MLP width, H and K heads, E head dimension,
Q = H*E, KV = K*E, R rank, V vocabulary, C rows of a tile (all tiles being as large), CL rows and W tokens
of a loss tile, W1 threads, and `scores`, a worker's scratch in attention's backward (ops/attention.py).

    g = 2*R*(D + Q) + 2*R*(D + KV) + 3*R*(D + F)
    head_rows = CL*(3*D + 1 + V)
    head_vocab = CL*(3*D + 4 + W)
    fixed = L*g*(1 + moments) + T*E + W1*weight_tile + N

g: the numbers in one layer's adapters, which is also their gradient.  head: the loss stage by rows
(`full` has CL = N) or by vocabulary tiles; the final x, which becomes dx, comes on top.  fixed:
adapters with their optimiser moments (0 for SGD, 2 for AdamW), cos and sin, the workers' scratch
(ops/matmul.py) and the losses; to which the batch adds 24*N bytes of ids, labels and the like, and
the gradient norm 8 bytes.

The peaks that the methods name: loss; mlp, when act or its gradient is there (dx, k, v, dk and dv are, of
all rows, and what is kept); and attention, in its backward, with q and dctx of the tile.
"""

from dataclasses import dataclass

from mesp_np.block import NAMES
from mesp_np.errors import UsageError
from mesp_np.methods import mebp, mesp, mesp_lean, mesp_store_h, mezo, store, store_lean


@dataclass(frozen=True)
class Method:
    """keep: names kept in a block; checkpoint: blocks are replayed; exact: False for MeZO."""

    name: str
    keep: frozenset
    checkpoint: bool = True
    exact: bool = True
    about: str = ""


METHODS = {method.name: method for method in (
    Method("store", store.KEEP, checkpoint=False, about=store.__doc__),
    Method("store-lean", store_lean.KEEP, checkpoint=False, about=store_lean.__doc__),
    Method("mebp", mebp.KEEP, about=mebp.__doc__),
    Method("mesp-store-h", mesp_store_h.KEEP, about=mesp_store_h.__doc__),
    Method("mesp", mesp.KEEP, about=mesp.__doc__),
    Method("mesp-lean", mesp_lean.KEEP, about=mesp_lean.__doc__),
    Method("mezo", frozenset(), checkpoint=False, exact=False, about=mezo.__doc__),
)}


def find(name, keep=()):
    """The method of this name; `keep` replaces its set, as in `--keep x,mid`.

    Raises UsageError for an unknown method or tensor name.
    """
    if name not in METHODS:
        raise UsageError(f"--method is {name!r}", f"choose from {', '.join(METHODS)}")
    method = METHODS[name]
    unknown = [tensor for tensor in keep if tensor not in NAMES]
    if unknown:
        raise UsageError(f"--keep names {', '.join(unknown)}", f"choose from {', '.join(NAMES)}")
    if keep and not (method.exact and method.checkpoint):
        raise UsageError(f"--keep cannot go with --method {name}", "it sets what a checkpointed method keeps")
    if not keep:
        return method
    return Method("keep:" + ",".join(keep), frozenset(keep), about="a keep set given on the command line")
