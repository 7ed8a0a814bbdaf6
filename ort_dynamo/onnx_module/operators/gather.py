"""Reading by tensors of indices; Gather itself is beside the shapes, which it reads most."""

from __future__ import annotations

import torch
from torch import Tensor

from ort_dynamo.onnx_module.registry import onnx_operator

__all__ = ["from_start"]


def from_start(indices: Tensor, length: int) -> Tensor:
    """Convert negative indices, which count from the end of an axis, to nonnegative ones."""
    return torch.where(indices < 0, indices + length, indices).to(torch.int64)


@onnx_operator("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """Take an element for each index, from its own position in the other axes."""
    return torch.gather(x, axis, from_start(indices, x.shape[axis]))


@onnx_operator("GatherND")
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """Take slices; the last axis of `indices` holds the indices of one, after `batch_dims` axes in common."""
    common = []
    for axis in range(batch_dims):
        shape = [1] * (indices.dim() - 1)
        shape[axis] = -1
        common.append(torch.reshape(torch.arange(x.shape[axis], device=x.device), shape))
    own = [from_start(part, x.shape[batch_dims + position]) for position, part in enumerate(torch.unbind(indices, -1))]
    return x[(*common, *own)]
