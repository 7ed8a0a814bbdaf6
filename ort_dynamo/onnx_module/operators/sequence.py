"""Sequences of tensors, which are Python's lists."""

from __future__ import annotations

import torch
from torch import Tensor

from ort_dynamo.onnx_module.host_values import Host, Setting, Value, integer, integers
from ort_dynamo.onnx_module.registry import onnx_operator

__all__: list[str] = []


@onnx_operator("SequenceConstruct")
def construct(x: Tensor, *others: Tensor) -> list[Tensor]:
    """Make a sequence of the inputs."""
    return [x, *others]


@onnx_operator("SequenceEmpty")
def empty(*, dtype: int = 1) -> list[Tensor]:
    """Make a sequence of nothing."""
    return []


@onnx_operator("SequenceAt")
def at(sequence: list[Tensor], position: Setting) -> Tensor:
    """One tensor of a sequence; negative positions count from the end."""
    return sequence[integer(position)]


@onnx_operator("SequenceLength")
def length(sequence: list[Tensor]) -> Value:
    """Return the number of elements."""
    return Host((len(sequence),), True, torch.int64, True)


@onnx_operator("SequenceInsert")
def insert(sequence: list[Tensor], x: Tensor, position: Setting | None = None) -> list[Tensor]:
    """With one more, at the end by default."""
    place = len(sequence) if position is None else integer(position)
    return [*sequence[:place], x, *sequence[place:]]


@onnx_operator("SequenceErase")
def erase(sequence: list[Tensor], position: Setting | None = None) -> list[Tensor]:
    """With one less, the last by default."""
    place = (len(sequence) - 1 if position is None else integer(position)) % len(sequence)
    return [*sequence[:place], *sequence[place + 1 :]]


@onnx_operator("ConcatFromSequence")
def join(sequence: list[Tensor], *, axis: int, new_axis: int = 0) -> Tensor:
    """Join along an axis, a new one if asked."""
    return torch.stack(sequence, axis) if new_axis else torch.cat(sequence, axis)


@onnx_operator("SplitToSequence")
def split_to_sequence(x: Tensor, split: Setting | None = None, *, axis: int = 0, keepdims: int = 1) -> list[Tensor]:
    """Into parts of given lengths, of one given length, or of 1, and then without the axis unless `keepdims`."""
    if split is None:
        return list(torch.split(x, 1, axis) if keepdims else torch.unbind(x, axis))
    lengths = integers(split)
    scalar = split.scalar if isinstance(split, Host) else split.dim() == 0
    return list(torch.split(x, lengths[0] if scalar else lengths, axis))
