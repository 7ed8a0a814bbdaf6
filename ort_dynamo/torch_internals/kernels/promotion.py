"""Type promotion of operators, and the memory format that their kernels see in a tensor."""

from __future__ import annotations

import torch

# torch describes elementwise operators by it, also to its own fake tensors; every tested version has it here.
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from torch._prims_common import elementwise_dtypes

from ort_dynamo.torch_internals.lookup import private

__all__ = ["KIND", "elementwise_dtypes", "is_contiguous", "memory_format_of"]

_is_contiguous = private("torch._prims_common:is_contiguous_or_false", torch.Tensor.is_contiguous)
_suggest_memory_format = private("torch._prims_common:suggest_memory_format")
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Check whether a tensor is known to be contiguous; installs no guard, unless torch lacks its function."""
    return bool(_is_contiguous(tensor))


def memory_format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format by whose kernels torch takes a tensor, be it dense or not.

    Without torch's function (suggest_memory_format in all tested versions) the same rule, which may install guards.
    """
    if _suggest_memory_format is not None:
        found: torch.memory_format = _suggest_memory_format(tensor)
        return found
    return _CHANNELS_LAST[tensor.dim()] if _is_like_channels_last(tensor) else torch.contiguous_format


def _is_like_channels_last(tensor: torch.Tensor) -> bool:
    """Check whether strides grow from the channels over the last to the first spatial dimension to the batch."""
    if tensor.dim() not in _CHANNELS_LAST or tensor.stride(1) == 0:
        return False
    least = 0
    for axis in (1, *range(tensor.dim() - 1, 1, -1), 0):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 0 or stride < least or (axis == 0 and least == tensor.stride(1)):
            return False
        least = stride * size if stride > 1 else stride
    return True
