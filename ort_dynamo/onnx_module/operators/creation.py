"""Operators that make tensors of numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ort_dynamo.onnx_module.host_values import Setting, Value, as_tensor, integer, number
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []


@onnx_operator("Range")
def arrange(start: Setting, limit: Setting, delta: Setting, *, device: torch.device | None) -> Tensor:
    """From start, by delta, before limit; nothing if start is past it."""
    first, last, step = number(start), number(limit), number(delta)
    passed = last < first if step > 0 else last > first
    return torch.arange(first, first if passed else last, step, dtype=start.dtype, device=device)


@onnx_operator("EyeLike")
def eye_like(x: Tensor, *, dtype: torch.dtype | None = None, k: int = 0) -> Tensor:
    """1 on the k-th diagonal, else 0."""
    rows, columns = x.shape
    found = torch.arange(columns, device=x.device) == torch.unsqueeze(torch.arange(rows, device=x.device), 1) + k
    return found.to(x.dtype if dtype is None else dtype)


def _one_hot(indices: Tensor, depth: int, values: Value, axis: int) -> Tensor:
    places = indices.to(torch.int64)
    places = torch.where(places < 0, places + depth, places)
    axis = axis + indices.dim() + 1 if axis < 0 else axis
    shape = [1] * (indices.dim() + 1)
    shape[axis] = depth
    classes = torch.reshape(torch.arange(depth, device=indices.device), shape)
    off, on = torch.unbind(as_tensor(values, indices.device))
    return torch.where(torch.unsqueeze(places, axis) == classes, on, off)


@onnx_operator("OneHot")
def one_hot(indices: Tensor, depth: Setting, values: Value, *, axis: int = -1) -> Tensor:
    """values[1] where an index says, else values[0]; an index beyond the depth says nothing."""
    return _one_hot(indices, int(number(depth)), values, axis)


@onnx_operator("NonZero")
def non_zero(x: Tensor) -> Tensor:
    """Return the indices of nonzero elements, a row for each axis."""
    return torch.transpose(torch.nonzero(x), 0, 1)


@onnx_operator("Compress")
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    """Return the entries of an axis, or of all elements in order, whose condition holds."""
    flat = torch.reshape(x, (-1,)) if axis is None else x
    along = 0 if axis is None else axis
    return torch.index_select(flat, along, torch.reshape(torch.nonzero(condition), (-1,)))


@onnx_operator("TopK")
def largest_by_attribute(x: Tensor, *, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """Return the k largest along an axis and their indices; the first of equals comes first."""
    return _top(x, k, axis, largest=True)


@onnx_operator("TopK", 10)
def largest(x: Tensor, k: Setting, *, axis: int = -1) -> tuple[Tensor, Tensor]:
    """Return the k largest along an axis and their indices; the first of equals comes first."""
    return _top(x, integer(k), axis, largest=True)


@onnx_operator("TopK", 11)
def top(
    x: Tensor,
    k: Setting,
    *,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the k largest or smallest along an axis and their indices; the first of equals comes first."""
    return _top(x, integer(k), axis, bool(largest))


def _top(x: Tensor, k: int, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.bool:
        raise TypeError("TopK takes numbers")
    values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
    return torch.narrow(values, axis, 0, k), torch.narrow(places, axis, 0, k)
