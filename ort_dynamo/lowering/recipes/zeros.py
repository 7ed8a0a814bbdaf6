"""Writes zeros to scatter into, made while the session runs."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext, Size

__all__ = ["zeros"]


def zeros(ctx: LoweringContext, like: ir.Value, sizes: Sequence[Size]) -> ir.Value:
    """Make zeros of shape `sizes` and the dtype of `like`, which must not be a constant; its elements are not read.

    ONNX Runtime would fold ConstantOfShape, or Expand of a constant shape, into an initializer. For the gradient of an
    embedding or a cross-entropy that is a constant as large as the whole table, copied at every step.
    """
    op = ctx.op
    empty = op.Slice(op.Reshape(like, [-1]), [0], [0], [0])
    if not sizes:
        return op.ReduceSum(empty, keepdims=0)
    rank, dtype = len(sizes), like.dtype or ir.DataType.FLOAT
    is_taken = dtype not in _INTEGERS or ctx.target.takes("Pad", "", {"T": ir.DataType.INT64})
    empty = empty if is_taken else op.Cast(empty, to=ir.DataType.FLOAT)
    found: ir.Value = op.Pad(ctx.reshape(empty, [0] * rank), ctx.shape([0] * rank + list(sizes)))
    return found if is_taken else op.Cast(found, to=dtype)


_INTEGERS = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8)
