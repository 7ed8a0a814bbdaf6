"""Places in a sorted list, and histograms."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch
from onnxscript import OpBuilder

from ort_dynamo.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Number, is_empty
from ort_dynamo.lowering.loops import repeat_while
from ort_dynamo.lowering.ops.reduction import extremum
from ort_dynamo.lowering.promotion import float_dtype
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.zeros import zeros

aten = torch.ops.aten

_FEW = 32
"""Up to so many boundaries, comparing with all of them is cheaper than bisecting."""


@lowering(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    ctx: LoweringContext, self: ir.Value | Number, boundaries: ir.Value, *, out_int32: bool = False, right: bool = False
) -> ir.Value:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"""
    return _search(ctx, boundaries, self, right)


@lowering(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    ctx: LoweringContext,
    sorted_sequence: ir.Value,
    self: ir.Value | Number,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: ir.Value | None = None,
) -> ir.Value:
    """searchsorted.Tensor(Tensor sorted_sequence, Tensor self, *, bool out_int32=False, bool right=False, str? side=None, Tensor? sorter=None) -> Tensor"""  # noqa: E501
    return _search(ctx, sorted_sequence, self, right or side == "right", sorter)


def _search(
    ctx: LoweringContext,
    boundaries: ir.Value,
    self: ir.Value | Number,
    right: bool,
    sorter: ir.Value | None = None,
) -> ir.Value:
    """How many boundaries along the last dimension lie before each entry, or with `right` are equal to it."""
    op, rank = ctx.op, ctx.rank(boundaries)
    dtype = ctx.dtype(boundaries)
    if isinstance(self, ir.Value):
        dtype = torch.promote_types(dtype, ctx.dtype(self))
        x = ctx.cast(self, float_dtype(dtype))
    else:
        x = ctx.scalar(self, float_dtype(dtype))
    b = ctx.cast(boundaries if sorter is None else op.GatherElements(boundaries, sorter, axis=-1), float_dtype(dtype))
    size = ctx.sizes(boundaries)[-1]

    def behind(op: OpBuilder, b: ir.Value, x: ir.Value) -> ir.Value:
        # Negated, so that nan lies behind every boundary.
        return op.Not(op.Greater(b, x) if right else op.GreaterOrEqual(b, x))

    if isinstance(size, int) and size <= _FEW:
        b = b if rank == 1 else op.Unsqueeze(b, [-2])
        passed = ctx.cast(behind(op, b, op.Unsqueeze(x, [-1])), torch.int64)
        # Counted from the front: ReduceSum of an empty tensor leaves the dimension -1 in place.
        return ctx.cast(op.ReduceSum(passed, [ctx.out.dim()], keepdims=0), ctx.out.dtype)

    def bisect(op: OpBuilder, carried: Sequence[ir.Value]) -> list[ir.Value]:
        low, high, width = carried
        middle = op.Div(op.Add(low, high), 2)
        # Where the search is over, middle may be one past the last boundary.
        place = op.Min(middle, last)
        found = op.Gather(b, place, axis=0) if rank == 1 else op.GatherElements(b, place, axis=-1)
        above = op.Cast(op.And(behind(op, found, x), op.Less(low, high)), to=onnx_dtype(torch.int64))
        low = op.Add(low, op.Mul(op.Sub(op.Add(middle, 1), low), above))
        high = op.Sub(high, op.Mul(op.Sub(high, middle), op.Sub(1, above)))
        return [low, high, op.Div(width, 2)]

    last = ctx.scalar(size - 1, torch.int64)
    width = ctx.scalar(size, torch.int64)
    low = op.Expand(ctx.constant(0, torch.int64), op.Shape(x))
    high = op.Expand(width, op.Shape(x))
    low, *_ = repeat_while(ctx, (low, high, width), lambda op, carried: op.Greater(carried[2], 0), bisect)
    return ctx.cast(low, ctx.out.dtype)


# -- histograms --------------------------------------------------------------------------------------------------


@lowering(aten.histc.default)
def histc(ctx: LoweringContext, self: ir.Value, bins: int = 100, min: Number = 0, max: Number = 0) -> ir.Value:
    """histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor"""
    op = ctx.op
    dtype = ctx.dtype(self)
    if dtype not in (torch.float32, torch.float64) or not all(isinstance(n, (int, float)) for n in (min, max)):
        raise ctx.refuse("a histogram of integers or half-width numbers, or with a symbolic range")
    x = op.Reshape(self, [-1])
    none = zeros(ctx, x, [bins])
    if is_empty(ctx.sizes(self)):
        return none
    if min == max:
        low, high = (extremum(ctx, reduction, x, [0], True) for reduction in ("ReduceMin", "ReduceMax"))
        same = op.Equal(low, high)
        low, high = op.Where(same, op.Sub(low, 1.0), low), op.Where(same, op.Add(high, 1.0), high)
    else:
        low, high = ctx.scalar(min, dtype), ctx.scalar(max, dtype)
    inside = op.And(op.GreaterOrEqual(x, low), op.LessOrEqual(x, high))
    scaled = op.Div(op.Mul(op.Sub(x, low), float(bins)), op.Sub(high, low))
    place = op.Cast(op.Where(inside, scaled, 0.0), to=onnx_dtype(torch.int64))
    place = op.Min(place, bins - 1)  # the last bin holds its upper end
    ones = ctx.cast(inside, dtype)
    return op.ScatterElements(none, place, ones, axis=0, reduction="add")
