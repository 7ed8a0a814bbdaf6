"""Reads constants of an ONNX model."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["constant_of"]


def constant_of(value: ir.Value | None) -> list[int] | None:
    """The integers that a value always has; None where it has none, or a run may give others."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]
