"""Find rows whose elements all equal one scalar, with kernels that handle only finite values."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ort_dynamo.lowering.op_builder import OpBuilder

__all__ = ["all_are"]


def all_are(op: OpBuilder, value: ir.Value, number: float, axes: Any, *, keepdim: bool) -> ir.Value:
    """Compute whether all elements over some axes equal `number`, which may be infinite.

    Args:
        op: the builder of the nodes.
        value: floats, at least one over the axes.
        number: the scalar.
        axes: the axes, as a reduction takes them.
        keepdim: whether they stay, with size 1.

    Returns:
        A bool value.
    """
    equal = op.Cast(op.Equal(value, number), to=ir.DataType.FLOAT)
    return op.Equal(op.ReduceMin(equal, axes, keepdims=int(keepdim)), 1.0)
