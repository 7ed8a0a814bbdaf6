"""Numbers of places along a dimension."""

from __future__ import annotations

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size

__all__ = ["from_start", "ordinals", "positions_along"]


def positions_along(ctx: LoweringContext, axis: int, size: Size, rank: int) -> ir.Value:
    """0, 1, … size - 1 along `axis` of `rank` dimensions, the others of size 1: int64."""
    zero, one = ctx.constant(0, torch.int64), ctx.constant(1, torch.int64)
    places = ctx.op.Range(zero, ctx.scalar(size, torch.int64), one)
    return ctx.op.Reshape(places, [-1 if i == axis else 1 for i in range(rank)])


def ordinals(ctx: LoweringContext, mask: ir.Value) -> ir.Value:
    """For each entry of a flat mask: how many are set before it, int64."""
    return ctx.op.CumSum(ctx.cast(mask, torch.int64), ctx.constant(0, torch.int64), exclusive=1)


def from_start(ctx: LoweringContext, index: ir.Value) -> ir.Value:
    """Make negative positions out of bounds, where torch's operator rejects them and ONNX's counts from the end.

    Without its sign bit, which valid positions do not have, a negative number lies beyond any size.

    Args:
        ctx: the node's.
        index: int32 or int64, of any shape.
    """
    greatest = (1 << 31 if index.dtype == ir.DataType.INT32 else 1 << 63) - 1
    return ctx.op.BitwiseAnd(index, greatest)
