"""Writing by tensors of indices, into a copy."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ort_dynamo.onnx_module.operators.gather import from_start
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []

_Reduction: TypeAlias = Literal["none", "add", "mul", "max", "min"]
_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@onnx_operator("Scatter", 9)
def scatter(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0) -> Tensor:
    """Write an element for each index, at its own position in the other axes."""
    return torch.scatter(x, axis, from_start(indices, x.shape[axis]), updates)


@onnx_operator("ScatterElements")
def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: _Reduction = "none"
) -> Tensor:
    """Write, or combine, an element for each index, at its own position in the other axes."""
    places = from_start(indices, x.shape[axis])
    if reduction == "none":
        return torch.scatter(x, axis, places, updates)
    if reduction == "add":
        return torch.scatter_add(x, axis, places, updates)
    return torch.scatter_reduce(x, axis, places, updates, _REDUCTIONS[reduction], include_self=True)


@onnx_operator("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: _Reduction = "none") -> Tensor:
    """Write, or combine, slices; the last axis of `indices` holds the indices of one."""
    depth = indices.shape[-1]
    parts = [from_start(part, x.shape[axis]) for axis, part in enumerate(torch.unbind(indices, -1))]
    if reduction in ("none", "add"):
        return torch.index_put(x, tuple(parts), updates, accumulate=reduction == "add")
    place = torch.zeros_like(parts[0])
    for part, size in zip(parts, x.shape[:depth], strict=True):
        place = place * size + part
    rest = math.prod(x.shape[depth:])
    rows = torch.reshape(x, (math.prod(x.shape[:depth]), rest))
    where = torch.reshape(place, (-1, 1)).expand(-1, rest)
    written = torch.reshape(updates, (math.prod(indices.shape[:-1]), rest))
    found = torch.scatter_reduce(rows, 0, where, written, _REDUCTIONS[reduction], include_self=True)
    return torch.reshape(found, x.shape)
