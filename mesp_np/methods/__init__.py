"""The methods: what each keeps of a block, and which driver runs it.

An exact method is a set of names and a flag: are blocks checkpointed, or is everything
kept for all of them at once?  MeZO has a driver of its own.  To add a method, write a
file with a KEEP set and its table, and enter it here.
"""

from dataclasses import dataclass

from mesp_np.block import NAMES
from mesp_np.errors import UsageError
from mesp_np.methods import mebp, mesp, mesp_lean, mesp_store_h, mezo, store


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
