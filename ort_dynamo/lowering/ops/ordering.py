"""Sorting, positions of extremes, and reversals."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.ops.views import axis, cut
from ort_dynamo.lowering.promotion import float_dtype
from ort_dynamo.lowering.registry import lowering, register

aten = torch.ops.aten


def _comparable(ctx: LoweringContext, self: ir.Value, nan: float = math.inf) -> ir.Value:
    """`self` as ONNX Runtime can order it: nan, which torch takes for the greatest number, becomes `nan`."""
    dtype = ctx.dtype(self)
    if not dtype.is_floating_point:
        return self
    x = ctx.cast(self, float_dtype(dtype))
    return ctx.op.Where(ctx.op.IsNaN(x), nan, x)


def _is_empty(ctx: LoweringContext, value: ir.Value) -> bool:
    return any(isinstance(size, int) and size == 0 for size in ctx.sizes(value))


# -- sorting -----------------------------------------------------------------------------------------------------


def _sorted(
    ctx: LoweringContext, self: ir.Value, count: Size, dim: int, largest: bool, in_order: bool = True
) -> tuple[ir.Value, ir.Value]:
    """The first `count` values along `dim` and their positions; of equal values the one that came first is first."""
    op = ctx.op
    if ctx.rank(self) == 0:
        return op.Identity(self), ctx.constant(0, torch.int64)
    if _is_empty(ctx, self) or (isinstance(count, int) and count == 0):
        # onnxruntime-training 1.19.2 divides by zero here, which ends the process.
        sizes = list(ctx.sizes(self))
        sizes[dim] = count
        nothing = ctx.shape(sizes)
        return op.Expand(ctx.constant(0, ctx.dtype(self)), nothing), op.Expand(ctx.constant(0, torch.int64), nothing)
    a = axis(dim, ctx.rank(self))
    values, positions = op.TopK(
        _comparable(ctx, self), ctx.shape([count]), axis=a, largest=int(largest), sorted=int(in_order), _outputs=2
    )
    if ctx.dtype(self).is_floating_point:
        values = op.GatherElements(self, positions, axis=a)
    return values, positions


@lowering(aten.topk.default)
def topk(
    ctx: LoweringContext, self: ir.Value, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[ir.Value, ...]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)"""  # noqa: E501
    return _sorted(ctx, self, k, dim, largest, sorted)


@lowering(aten.sort.default)
def sort(ctx: LoweringContext, self: ir.Value, dim: int = -1, descending: bool = False) -> tuple[ir.Value, ...]:
    """sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    size = ctx.sizes(self)[dim] if ctx.rank(self) else 1
    return _sorted(ctx, self, size, dim, descending)


@lowering(aten.sort.stable)
def sort_stable(
    ctx: LoweringContext, self: ir.Value, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[ir.Value, ...]:
    """sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""  # noqa: E501
    return sort(ctx, self, dim, descending)


@lowering(aten.kthvalue.default)
def kthvalue(
    ctx: LoweringContext, self: ir.Value, k: Size, dim: int = -1, keepdim: bool = False
) -> tuple[ir.Value, ...]:
    """kthvalue(Tensor self, SymInt k, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    first = _sorted(ctx, self, k, dim, largest=False)
    if ctx.rank(self) == 0:
        return first
    a = axis(dim, ctx.rank(self))
    last = [cut(ctx, value, a, -1, sys.maxsize) for value in first]
    return tuple(last if keepdim else (ctx.op.Squeeze(value, [a]) for value in last))


# -- positions of extremes ---------------------------------------------------------------------------------------


def _extreme(
    op_type: str, ctx: LoweringContext, self: ir.Value, dim: int | None = None, keepdim: bool = False
) -> ir.Value:
    """argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    op = ctx.op
    if _is_empty(ctx, self):
        return op.Expand(ctx.constant(0, torch.int64), ctx.shape(ctx.out.shape))
    largest = op_type == "ArgMax"
    x = _comparable(ctx, self, math.inf if largest else -math.inf)
    if dim is None or ctx.rank(self) == 0:
        x, a = op.Reshape(x, [-1]), 0
    else:
        a = axis(dim, ctx.rank(self))
    if x.dtype == ir.DataType.INT64 and not ctx.target.takes(op_type, "", {"T": ir.DataType.INT64}):
        _, found = op.TopK(x, [1], axis=a, largest=int(largest), _outputs=2)
        return ctx.reshape(found, ctx.out.shape)
    found = getattr(op, op_type)(x, axis=a, keepdims=1)
    return ctx.reshape(found, ctx.out.shape)


register(aten.argmax.default, functools.partial(_extreme, "ArgMax"))
register(aten.argmin.default, functools.partial(_extreme, "ArgMin"))


# -- places in a sorted list -------------------------------------------------------------------------------------


@lowering(aten.bucketize.Tensor)
def bucketize(
    ctx: LoweringContext, self: ir.Value, boundaries: ir.Value, *, out_int32: bool = False, right: bool = False
) -> ir.Value:
    """bucketize.Tensor(Tensor self, Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"""
    op = ctx.op
    dtype = torch.promote_types(ctx.dtype(self), ctx.dtype(boundaries))
    x, b = op.Unsqueeze(ctx.cast(self, dtype), [-1]), ctx.cast(boundaries, dtype)
    # Negated, so that nan lies behind every boundary.
    passed = op.Not(op.Greater(b, x) if right else op.GreaterOrEqual(b, x))
    total = op.ReduceSum(op.Cast(passed, to=onnx_dtype(torch.int64)), [-1], keepdims=0)
    return ctx.cast(total, ctx.out.dtype)


# -- reversals ---------------------------------------------------------------------------------------------------


@lowering(aten.flip.default)
def flip(ctx: LoweringContext, self: ir.Value, dims: Sequence[int]) -> ir.Value:
    """flip(Tensor self, int[] dims) -> Tensor"""
    axes = [axis(dim, ctx.rank(self)) for dim in dims]
    if not axes or ctx.rank(self) == 0:
        return self
    backwards = ctx.ints([-1] * len(axes))
    before_first = ctx.ints([-sys.maxsize - 1] * len(axes))
    return ctx.op.Slice(self, backwards, before_first, ctx.ints(axes), backwards)


@lowering(aten.roll.default)
def roll(ctx: LoweringContext, self: ir.Value, shifts: Sequence[Size], dims: Sequence[int] = ()) -> ir.Value:
    """roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor"""
    sizes = ctx.sizes(self)
    if _is_empty(ctx, self) or not sizes:
        return self
    if not dims:
        flat = ctx.op.Reshape(self, [-1])
        return ctx.reshape(_roll(ctx, flat, 0, shifts[0], ctx.fake(self).numel()), sizes)
    value = self
    for shift, dim in zip(shifts, dims, strict=True):
        a = axis(dim, len(sizes))
        value = _roll(ctx, value, a, shift, sizes[a])
    return value


def _roll(ctx: LoweringContext, value: ir.Value, a: int, shift: Size, size: Size) -> ir.Value:
    start: Size = -shift % size  # type: ignore[operator]
    if isinstance(start, int) and start == 0:
        return value
    return ctx.op.Concat(cut(ctx, value, a, start, sys.maxsize), cut(ctx, value, a, 0, start), axis=a)
