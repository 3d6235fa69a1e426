"""transformers in float64 throughout.

Its models round to float32 inside RMSNorm, softmax and RoPE, whatever their dtype.  With another `torch` in their
module, one whose names for single precision mean float64, every number stays float64.
"""

from unittest import mock

import torch


class Float64Torch:
    """`torch`, except that its names for single precision mean float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def float64_throughout(modelling):
    """A context in which the models of this transformers module are made and run in float64 alone."""
    return mock.patch.object(modelling, "torch", Float64Torch())
