"""A sigmoid that is as accurate far below zero as elsewhere."""

from __future__ import annotations

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext

__all__ = ["sigmoid"]


def sigmoid(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Give 1 / (1 + exp(-x)) of a floating-point value, to a few units in the last place."""
    op = ctx.op
    if not ctx.target.has_defect("sigmoid_below_zero"):
        return op.Sigmoid(x)
    return op.Reciprocal(op.Add(op.Exp(op.Neg(x)), 1.0))
