"""One file an operation: derivation, forward, backward, kernels.

Every public function takes the team first, then outputs, then inputs, then sizes.
It checks shapes (in a plan too, so planning is also shape checking) and then calls
kernels: scalar loops over a row range that allocate nothing and write only to their
outputs.  Ops never see the arena: they get arrays.
"""


class ShapeError(ValueError):
    """An op was given arrays whose shapes do not fit together."""


def expect(shape, **arrays):
    """Raise ShapeError unless every named array (None is skipped) has this shape."""
    for name, array in arrays.items():
        if array is not None and array.shape != tuple(shape):
            raise ShapeError(f"{name} has shape {array.shape}, expected {tuple(shape)}")
