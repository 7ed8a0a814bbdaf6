"""Operators that read, make and change shapes: those that compute with a Host where they get one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ort_dynamo.onnx_module.host_values import (
    HOST_LIMIT,
    Host,
    Setting,
    Value,
    as_tensor,
    integer,
    integers,
    map_host,
)
from ort_dynamo.onnx_module.registry import onnx_operator

__all__ = ["split_parts"]


@onnx_operator("Shape")
def shape(x: Value, *, start: int = 0, end: int | None = None) -> Value:
    """Return the sizes of some axes."""
    if isinstance(x, Host):
        sizes: tuple[Any, ...] = () if x.scalar else (len(x.values),)
        return Host(sizes[start:end], False, torch.int64, True)
    return Host(tuple(x.shape)[start:end], False, torch.int64)


@onnx_operator("Size")
def size(x: Value) -> Value:
    """Return the number of elements."""
    if isinstance(x, Host):
        return Host((len(x.values),), True, torch.int64, True)
    return Host((math.prod(x.shape),), True, torch.int64)


@onnx_operator("Reshape")
def reshape(x: Value, shape: Setting, *, allowzero: int = 0, device: torch.device | None) -> Value:
    """To a shape in which -1 is the remaining size, and 0 the size that the axis has, unless `allowzero`."""
    sizes = integers(shape)
    if isinstance(x, Host):
        if not sizes and len(x.values) == 1:
            return x._replace(scalar=True)
        if len(sizes) == 1:
            return x._replace(scalar=False)
        x = as_tensor(x, device)
    if not allowzero:
        sizes = [x.shape[axis] if length == 0 else length for axis, length in enumerate(sizes)]
    return torch.reshape(x, sizes)


@onnx_operator("Flatten")
def flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    """To a matrix, whose rows are the axes before one."""
    axis = axis + x.dim() if axis < 0 else axis
    return torch.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


def _squeeze(x: Value, axes: list[int] | None, device: torch.device | None) -> Value:
    if isinstance(x, Host):
        if len(x.values) == 1 and (axes is None or axes in ([0], [-1])):
            return x._replace(scalar=True)
        x = as_tensor(x, device)
    if axes is None:
        return torch.squeeze(x)
    wrong = [axis for axis in axes if x.shape[axis] != 1]
    if wrong:
        raise ValueError(f"Squeeze of axes {wrong}, which have not the size 1")
    return torch.squeeze(x, tuple(axes))


@onnx_operator("Squeeze")
def squeeze_by_attribute(x: Value, *, axes: list[int] | None = None, device: torch.device | None) -> Value:
    """Drop axes of size 1: the given ones, or all."""
    return _squeeze(x, axes, device)


@onnx_operator("Squeeze", 13)
def squeeze(x: Value, axes: Setting | None = None, *, device: torch.device | None) -> Value:
    """Drop axes of size 1: the given ones, or all."""
    return _squeeze(x, None if axes is None else integers(axes), device)


def _unsqueeze(x: Value, axes: list[int], device: torch.device | None) -> Value:
    if isinstance(x, Host):
        if x.scalar and axes in ([0], [-1]):
            return x._replace(scalar=False)
        x = as_tensor(x, device)
    rank = x.dim() + len(axes)
    places = sorted(axis + rank if axis < 0 else axis for axis in axes)
    if len(set(places)) != len(places):
        raise ValueError(f"Unsqueeze names an axis twice: {axes}")
    for axis in places:
        x = torch.unsqueeze(x, axis)
    return x


@onnx_operator("Unsqueeze")
def unsqueeze_by_attribute(x: Value, *, axes: list[int], device: torch.device | None) -> Value:
    """Insert axes of size 1, numbered as in the result."""
    return _unsqueeze(x, axes, device)


@onnx_operator("Unsqueeze", 13)
def unsqueeze(x: Value, axes: Setting, *, device: torch.device | None) -> Value:
    """Insert axes of size 1, numbered as in the result."""
    return _unsqueeze(x, integers(axes), device)


@onnx_operator("Expand")
def expand(x: Value, shape: Setting, *, device: torch.device | None) -> Value:
    """Broadcast to a shape, and the shape to x."""
    wanted = integers(shape)
    if isinstance(x, Host):
        if isinstance(shape, Host) and shape.fixed and len(wanted) < 2 and wanted <= [HOST_LIMIT]:
            return map_host(lambda value, _: value, x, x._replace(values=(0,) * math.prod(wanted), scalar=not wanted))
        x = as_tensor(x, device)
    rank = max(len(wanted), x.dim())
    own = [1] * (rank - x.dim()) + list(x.shape)
    wanted = [1] * (rank - len(wanted)) + wanted
    return x.expand([b if a == 1 else a for a, b in zip(own, wanted, strict=True)])


@onnx_operator("Concat")
def concat(first: Value, *others: Value, axis: int, device: torch.device | None) -> Value:
    """Join along an axis."""
    values = (first, *others)
    hosts = [value for value in values if isinstance(value, Host)]
    short = sum(len(value.values) for value in hosts) <= HOST_LIMIT
    if len(hosts) == len(values) and axis in (0, -1) and short and not any(value.scalar for value in hosts):
        elements = tuple(element for value in hosts for element in value.values)
        return Host(elements, False, hosts[0].dtype, all(value.fixed for value in hosts))
    return torch.cat([as_tensor(value, device) for value in values], axis)


def split_parts(length: int, outputs: int) -> list[int]:
    """Return the lengths of equal parts; the last one may be shorter."""
    part = -(-length // outputs)
    return [part] * (outputs - 1) + [length - part * (outputs - 1)]


def _split(x: Value, axis: int, parts: list[int] | None, outputs: int) -> tuple[Value, ...]:
    length = len(x.values) if isinstance(x, Host) else x.shape[axis]
    lengths = split_parts(length, outputs) if parts is None else parts
    if not isinstance(x, Host):
        return tuple(torch.split(x, lengths, axis))
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return tuple(x._replace(values=x.values[a : a + b]) for a, b in zip(starts, lengths, strict=True))


@onnx_operator("Split")
def split_by_attribute(x: Value, *, axis: int = 0, split: list[int] | None = None, outputs: int) -> tuple[Value, ...]:
    """Into parts of given lengths, or equal ones."""
    return _split(x, axis, split, outputs)


@onnx_operator("Split", 13)
def split_by_input(x: Value, split: Setting | None = None, *, axis: int = 0, outputs: int) -> tuple[Value, ...]:
    """Into parts of given lengths, or equal ones."""
    return _split(x, axis, None if split is None else integers(split), outputs)


@onnx_operator("Split", 18)
def split(
    x: Value, split: Setting | None = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> tuple[Value, ...]:
    """Split into parts of given lengths, or into equal ones, with a shorter last one if need be."""
    return _split(x, axis, None if split is None else integers(split), num_outputs or outputs)


def _slice(x: Value, starts: list[int], ends: list[int], axes: list[int] | None, steps: list[int] | None) -> Value:
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if isinstance(x, Host):
        values = x.values
        for start, end, _, step in zip(starts, ends, axes, steps, strict=True):
            backwards = step < 0 and end < -len(values)
            if step < 0:  # a start before the first element is the first one
                start = max(start, -len(values))
            values = values[start : None if backwards else end : step]
        return x._replace(values=values)
    places: list[slice] = [slice(None)] * x.dim()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0:
            length = x.shape[axis]
            start = min(max(start + length, 0) if start < 0 else start, length - 1)
            end = max(end + length, -1) if end < 0 else min(end, length - 1)
            x = torch.flip(x, [axis])
            start, end, step = length - 1 - start, length - 1 - end, -step
        places[axis] = slice(start, end, step)
    return x[tuple(places)]


@onnx_operator("Slice")
def slice_by_attributes(x: Value, *, starts: list[int], ends: list[int], axes: list[int] | None = None) -> Value:
    """From start to end along axes; indices beyond are cut off."""
    return _slice(x, starts, ends, axes, None)


@onnx_operator("Slice", 10)
def slice_by_inputs(
    x: Value, starts: Setting, ends: Setting, axes: Setting | None = None, steps: Setting | None = None
) -> Value:
    """From start to end by steps along axes; indices beyond are cut off."""
    return _slice(
        x,
        integers(starts),
        integers(ends),
        None if axes is None else integers(axes),
        None if steps is None else integers(steps),
    )


@onnx_operator("ConstantOfShape")
def constant_of_shape(shape: Setting, *, value: Host | None = None, device: torch.device | None) -> Value:
    """One number everywhere; a Host where its length is that of a shape."""
    sizes = integers(shape)
    value = value or Host((0.0,), True, torch.float32)
    (fill,) = value.values
    if isinstance(shape, Host) and shape.fixed and len(sizes) == 1 and 0 <= sizes[0] <= HOST_LIMIT:
        return Host((fill,) * sizes[0], False, value.dtype, True)
    return torch.full(sizes, fill, dtype=value.dtype, device=device)


@onnx_operator("Tile")
def tile(x: Tensor, repeats: Setting) -> Tensor:
    """Repeat along each axis."""
    return x.repeat(integers(repeats))


@onnx_operator("Gather")
def gather(x: Value, indices: Value, *, axis: int = 0) -> Value:
    """Take entries of an axis; negative indices count from the end."""
    if isinstance(x, Host):
        if isinstance(indices, Host):
            return Host(tuple(x.values[index] for index in indices.values), indices.scalar, x.dtype, x.fixed)
        x = as_tensor(x, indices.device)
    if isinstance(indices, Host):
        if indices.scalar:
            return torch.select(x, axis, integer(indices))
        indices = as_tensor(indices, x.device)
    places = torch.where(indices < 0, indices + x.shape[axis], indices)
    if axis == 0 and x.dim() == 2:
        return torch.nn.functional.embedding(places, x)
    axis = axis + x.dim() if axis < 0 else axis
    found = torch.index_select(x, axis, torch.reshape(places, (-1,)))
    return torch.reshape(found, (*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))
