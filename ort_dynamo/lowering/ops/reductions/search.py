"""Indices in a sorted list."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Number, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.elementwise.unary import is_float
from ort_dynamo.lowering.recipes.loops import repeat_while
from ort_dynamo.lowering.recipes.positions import from_start
from ort_dynamo.lowering.recipes.promotion import promote
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten

_FEW = 32
"""Up to so many boundaries, comparing with all of them is cheaper than bisecting."""


@lowering(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    ctx: LoweringContext, self: ir.Value | Number, boundaries: ir.Value, *, out_int32: bool = False, right: bool = False
) -> ir.Value:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"""
    if ctx.rank(boundaries) != 1:
        raise ctx.refuse("torch takes boundaries of 1 dimension only")
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
    rank = ctx.rank(boundaries)
    (b, x), _ = promote(ctx, boundaries, self)
    if sorter is not None:
        b = ctx.op.GatherElements(b, from_start(ctx, sorter), axis=-1)
    found = places_among(ctx, b, rank, ctx.sizes(boundaries)[-1], x, ctx.out.dim(), right)
    return ctx.cast(found, ctx.out.dtype)


def places_among(
    ctx: LoweringContext, boundaries: ir.Value, rank: int, size: Size, x: ir.Value, x_rank: int, right: bool
) -> ir.Value:
    """Count the boundaries below each entry of `x`, of `size` along the last of `rank` dimensions; int64.

    With `right`, boundaries equal to the entry count, too. nan is above all boundaries. Where these end in nan, the
    result is what torch's bisection happens to find, since no entry is below a nan.
    """
    op, b = ctx.op, boundaries

    def behind(op: OpBuilder, b: ir.Value, x: ir.Value) -> ir.Value:
        # Negated, so that nan is above every boundary.
        return op.Not(op.Greater(b, x) if right else op.GreaterOrEqual(b, x))

    few = size if isinstance(size, int) and size <= _FEW else None
    if few is not None and (few < 2 or not is_float(b)):
        b = b if rank == 1 else op.Unsqueeze(b, [-2])
        passed = ctx.cast(behind(op, b, op.Unsqueeze(x, [-1])), torch.int64)
        # Counted from the front: ReduceSum of an empty tensor leaves the dimension -1 in place.
        return op.ReduceSum(passed, [x_rank], keepdims=0)

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
    carried = [low, high, width]
    if few is not None:
        for _ in range(few.bit_length()):
            carried = bisect(op, carried)
        return carried[0]
    low, *_ = repeat_while(ctx, carried, lambda op, carried: op.Greater(carried[2], 0), bisect)
    return low
