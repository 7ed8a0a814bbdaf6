"""Writes the first, or the last, index of a sought element along an axis."""

from __future__ import annotations

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder

__all__ = ["first_greatest", "first_index"]

_MOST_IN_FLOAT = 1 << 24


def first_index(
    ctx: LoweringContext,
    found: ir.Value,
    axis: int,
    size: Size,
    rank: int,
    *,
    keepdims: bool = True,
    last: bool = False,
    flags: ir.Value | None = None,
    op: OpBuilder | None = None,
) -> ir.Value:
    """Give the first index, or the last, along an axis at which a bool is set: int64.

    If ArgMax does not give the first of equal values (defect arg_max_of_equals), it reduces the indices.

    Args:
        ctx: the node's context.
        found: bool, true somewhere in each row.
        axis: the axis, counted from the front.
        size: the size of the axis.
        rank: the rank of `found`.
        keepdims: whether the axis stays, with size 1.
        last: give the last index instead of the first.
        flags: `found` as integers, if there is such a value.
        op: the builder of the enclosing branch, if there is one.
    """
    op = op or ctx.op
    place: ir.Value
    if not ctx.target.has_defect("arg_max_of_equals"):
        flags = op.Cast(found, to=ir.DataType.UINT8) if flags is None else flags
        which = {"select_last_index": 1} if last else {}
        place = op.ArgMax(flags, axis=axis, keepdims=int(keepdims), **which)
        return place
    dtype = _holding(size)
    one = -1.0 if not last else 1.0
    count = ctx.scalar(size, torch.int64)
    end = op.Mul(op.Cast(count, to=dtype), op.builder.promote(one, dtype))
    # Negative for the first, so that the extreme is a maximum, which fused kernels have.
    places = op.Range(op.builder.promote(0.0, dtype), end, op.builder.promote(one, dtype))
    places = op.Reshape(places, [-1 if a == axis else 1 for a in range(rank)])
    outside = op.builder.promote(-1.0, dtype) if last else end
    extreme = op.ReduceMax(op.Where(found, places, outside), [axis], keepdims=int(keepdims))
    place = op.Cast(extreme if last else op.Neg(extreme), to=ir.DataType.INT64)
    return place


def first_greatest(ctx: LoweringContext, x: ir.Value, axis: int, size: Size, rank: int) -> ir.Value:
    """Give the first index of the maximum of int32 along an axis, which stays with size 1: int64."""
    op = ctx.op
    if not ctx.target.has_defect("arg_max_of_equals"):
        place: ir.Value = op.ArgMax(x, axis=axis)
        return place
    wide = op.Cast(x, to=ir.DataType.DOUBLE)
    found = op.Equal(wide, op.ReduceMax(wide, [axis], keepdims=1))
    return first_index(ctx, found, axis, size, rank)


def _holding(size: Size) -> ir.DataType:
    """Return the floating-point dtype that holds the indices of an axis."""
    return ir.DataType.FLOAT if isinstance(size, int) and size <= _MOST_IN_FLOAT else ir.DataType.DOUBLE
