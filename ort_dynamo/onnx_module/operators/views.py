"""Operators that move elements by fixed rules."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ort_dynamo.onnx_module.host_values import Setting, integer
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []


@onnx_operator("Transpose")
def transpose(x: Tensor, *, perm: list[int] | None = None) -> Tensor:
    """Reorder the axes; reverse them by default."""
    return torch.permute(x, list(range(x.dim()))[::-1] if perm is None else perm)


@onnx_operator("Trilu")
def triangle(x: Tensor, k: Setting | None = None, *, upper: int = 1) -> Tensor:
    """Return the upper or lower triangle of matrices, with the k-th diagonal."""
    diagonal = 0 if k is None else integer(k)
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@onnx_operator("DepthToSpace")
def depth_to_space(x: Tensor, *, blocksize: int, mode: Literal["DCR", "CRD"] = "DCR") -> Tensor:
    """(N, C·b², H, W) to (N, C, H·b, W·b); `mode` says whether the block or the channel comes first in the depth."""
    n, depth, height, width = x.shape
    channels = depth // blocksize**2
    if mode == "DCR":
        parts = torch.reshape(x, (n, blocksize, blocksize, channels, height, width))
        parts = torch.permute(parts, (0, 3, 4, 1, 5, 2))
    else:
        parts = torch.reshape(x, (n, channels, blocksize, blocksize, height, width))
        parts = torch.permute(parts, (0, 1, 4, 2, 5, 3))
    return torch.reshape(parts, (n, channels, height * blocksize, width * blocksize))


@onnx_operator("SpaceToDepth")
def space_to_depth(x: Tensor, *, blocksize: int, mode: Literal["DCR", "CRD"] = "DCR") -> Tensor:
    """(N, C, H·b, W·b) to (N, b²·C, H, W); `mode` as in DepthToSpace."""
    n, channels, height, width = x.shape
    rows, columns = height // blocksize, width // blocksize
    parts = torch.reshape(x, (n, channels, rows, blocksize, columns, blocksize))
    if mode == "DCR":
        parts = torch.permute(parts, (0, 3, 5, 1, 2, 4))
    else:
        parts = torch.permute(parts, (0, 1, 3, 5, 2, 4))
    return torch.reshape(parts, (n, channels * blocksize**2, rows, columns))


@onnx_operator("ReverseSequence")
def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int = 1, time_axis: int = 0) -> Tensor:
    """Reverse the first `lengths[b]` entries along the time of each batch entry b."""
    turned = torch.movedim(x, (batch_axis, time_axis), (0, 1))
    time = torch.arange(turned.shape[1], device=x.device)
    ends = torch.unsqueeze(lengths, 1)
    places = torch.where(time < ends, ends - 1 - time, time)
    batch = torch.unsqueeze(torch.arange(turned.shape[0], device=x.device), 1)
    return torch.movedim(turned[batch, places], (0, 1), (batch_axis, time_axis))
