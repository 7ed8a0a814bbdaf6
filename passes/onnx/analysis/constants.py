"""Reads constants of an ONNX model."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["constant_of", "number_of"]


def constant_of(value: ir.Value | None) -> list[int] | None:
    """Return the integers that a value always has; None where it has none, or a run may give others."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]


def number_of(value: ir.Value) -> float | int | bool | None:
    """Return the scalar of a constant of one element; None for other values."""
    if value.is_graph_input() or (tensor := ir.convenience.get_const_tensor(value)) is None or tensor.size != 1:
        return None
    number = tensor.numpy().reshape(-1)[0]
    found: float | int | bool = float(number) if tensor.dtype.is_floating_point() else number.item()
    return found
