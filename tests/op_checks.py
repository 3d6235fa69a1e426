"""The standard checks of an op, and how close is close.

forward        against a plain float64 reference, within TOLERANCE
gradient       the op's cases of the gradient check
alias          an output that takes its input's place gets the same bits
phantom        runs on phantoms; wrong shapes raise there too
hidden_memory  one call allocates next to nothing
"""

import tracemalloc

import numpy as np
import pytest

from mesp_np.arena import phantom as phantom_array
from mesp_np.gradcheck import check_ops
from mesp_np.ops import ShapeError

TOLERANCE = {"float32": 1e-6, "float64": 2e-15}      # of the reference's largest element
HIDDEN_BYTES = 64 * 1024


def normal(rng, dtype, *shapes):
    """Standard normal arrays."""
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def forward(actual, reference, *inputs):
    """actual == reference(*inputs), the reference taking the same numbers as float64."""
    expected = reference(*[np.asarray(x, np.float64) if x.dtype.kind == "f" else x for x in inputs])
    close(actual, expected)


def close(actual, expected):
    """Equal within the tolerance of actual's dtype; prints how much of it was used."""
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    used = np.abs(actual - expected).max() / np.abs(expected).max() / TOLERANCE[actual.dtype.name]
    print(f"{used:.0%} of the tolerance used")
    assert used <= 1


def same_bits(actual, expected):
    """Equal dtype, shape and bytes, NaN and signed zeros included."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


def gradient(name, count):
    """Every input of every case of an op has the right gradient; `count` guards against an empty list."""
    checks = check_ops(only=name)
    assert len(checks) == count
    assert [check for check in checks if not check.passed] == []


def alias(team, op, inputs, places):
    """op(team, **outputs, **inputs) with outputs in arrays of their own, and in their inputs' places."""
    apart = {out: np.empty_like(inputs[source]) for out, source in places.items()}
    op(team, **apart, **inputs)
    shared = {name: array.copy() for name, array in inputs.items()}
    op(team, **{out: shared[source] for out, source in places.items()}, **shared)
    for out, source in places.items():
        same_bits(shared[source], apart[out])


def phantom(team, call):
    """Phantoms in, nothing computed; and an array that is too long along any axis is refused."""
    arrays = call.arrays(phantom_array, np.float32)
    call(team, arrays)
    for name, array in arrays.items():
        for axis, size in enumerate(array.shape):
            if f"{name}.{axis}" not in call.free:
                longer = phantom_array((*array.shape[:axis], size + 1, *array.shape[axis + 1:]), array.dtype)
                with pytest.raises(ShapeError):
                    call(team, arrays | {name: longer})


def hidden_memory(team, call, dtype):
    """The peak of what NumPy and Numba allocate during one call, after a first to warm up."""
    arrays = call.arrays(np.ones, dtype)
    call(team, arrays)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        call(team, arrays)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < HIDDEN_BYTES
