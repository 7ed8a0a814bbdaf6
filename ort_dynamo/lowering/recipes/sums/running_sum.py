"""Writes the running sum of a flat value."""

from __future__ import annotations

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext

__all__ = ["running_sum"]


def running_sum(ctx: LoweringContext, value: ir.Value) -> ir.Value:
    """Take the inclusive running sum of a 1-D value, which may be empty.

    Where the kernel is slow along one line, it is summed within the columns of a square, and over them.
    """
    op, first = ctx.op, ctx.constant(0, torch.int64)
    if not ctx.target.has_defect("slow_running_sum"):
        return op.CumSum(value, first)
    count = op.Shape(value)
    root = op.Ceil(op.Sqrt(op.Cast(count, to=ir.DataType.DOUBLE)))
    height = op.Cast(op.Max(root, 1.0), to=ir.DataType.INT64)
    columns = op.Div(op.Add(count, op.Sub(height, 1)), height)
    padded = op.Pad(value, op.Concat(ctx.ints([0]), op.Sub(op.Mul(height, columns), count), axis=0))
    square = op.Transpose(op.Reshape(padded, op.Concat(columns, height, axis=0), allowzero=1), perm=[1, 0])
    within = op.CumSum(square, first)
    before = op.CumSum(op.Gather(within, ctx.constant(-1, torch.int64), axis=0), first, exclusive=1)
    whole = op.Transpose(op.Add(within, before), perm=[1, 0])
    return op.Slice(op.Reshape(whole, [-1]), [0], count)
