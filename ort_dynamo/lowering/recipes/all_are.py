"""Tells rows that hold one number alone, by kernels that see finite numbers only."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ort_dynamo.lowering.op_builder import OpBuilder

__all__ = ["all_are"]


def all_are(op: OpBuilder, value: ir.Value, number: float, axes: Any, *, keepdim: bool) -> ir.Value:
    """Compute whether all numbers over some axes equal `number`, which may be infinite.

    Args:
        op: makes the nodes.
        value: floating-point numbers, at least one over the axes.
        number: the number.
        axes: the axes, as a reduction takes them.
        keepdim: whether they stay, with size 1.

    Returns:
        Truth values.
    """
    equal = op.Cast(op.Equal(value, number), to=ir.DataType.FLOAT)
    return op.Equal(op.ReduceMin(equal, axes, keepdims=int(keepdim)), 1.0)
