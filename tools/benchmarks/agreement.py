"""Do two systems compute the same?  Their gradients of all adapters, compared before anything is measured.

A kind of variant says how closely it must agree with the reference gradient g, that of this engine:

    exact      float32 throughout           |a - g| / |g|
    rounded    products in bfloat16         |a - g| / |g|
    estimate   MeZO's c z, z ~ N(0, I)      |c - z . g| / |g|, with |c| = |c z| / sqrt(d): a wrong gradient, or another
                                            z in the update than in the losses, is about 1 away
    loss       has no gradient              |loss / loss of the reference - 1|

Gradients travel in .npz files, under the names that adapters have here (`layers.0.self_attn.q_proj.lora_A`), A (R, in)
and B (out, R).
"""

import math

import numpy as np

EXACT, ROUNDED, ESTIMATE, LOSS = "exact", "rounded", "estimate", "loss"
LIMITS = {EXACT: 1e-3, ROUNDED: 0.14, ESTIMATE: 0.1, LOSS: 1e-3}


def save(path, gradients):
    """Write name -> array."""
    np.savez(path, **gradients)


def take(path):
    """Name -> array of what was written, which is then removed; None when nothing was."""
    if not path.exists():
        return None
    with np.load(path) as file:
        gradients = dict(file)
    path.unlink()
    return gradients


def difference(kind, computed, reference):
    """How far two systems are apart, by the measure of `kind`; each is (loss, gradients), name -> array or None.

    Raises ValueError when the gradients are not of the same tensors.
    """
    (loss, gradients), (expected_loss, expected) = computed, reference
    if kind == LOSS:
        return abs(loss / expected_loss - 1)
    shapes = [{name: array.shape for name, array in side.items()} for side in (gradients, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{len(gradients)} gradients, of which {len(shapes[0].items() & shapes[1].items())} are among "
                         f"the {len(expected)} expected")
    a, g = (np.concatenate([side[name].ravel().astype(np.float64) for name in expected])
            for side in (gradients, expected))
    size = np.linalg.norm(g)
    if kind != ESTIMATE:
        return np.linalg.norm(a - g) / size
    slope = np.linalg.norm(a) / math.sqrt(a.size)
    return abs(slope - a @ g / slope) / size if slope else math.inf
