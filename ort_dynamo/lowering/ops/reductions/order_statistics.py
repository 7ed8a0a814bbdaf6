"""Medians, modes and k-th smallest values."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.memory.views import axis, cut
from ort_dynamo.lowering.ops.reductions.ordering import sorted_along, sorted_with_nan
from ort_dynamo.lowering.recipes.branches import if_finite
from ort_dynamo.lowering.recipes.checks import called, has_elements, none_missing
from ort_dynamo.lowering.recipes.first_index import first_greatest, first_index
from ort_dynamo.lowering.recipes.positions import positions_along
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.prefix_scan import prefix_scan
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.torch_internals.kernels.operators import aten

Statistic = Callable[[LoweringContext, ir.Value, int, Size, int], tuple[ir.Value, ir.Value]]
"""statistic(ctx, x, axis, size, rank): value and position along `axis` of `size`, not zero; the axis stays, of size 1.

`x` has an accumulation dtype and `rank` axes.
"""


def _along(
    statistic: Statistic, ctx: LoweringContext, self: ir.Value, dim: int = -1, keepdim: bool = False
) -> tuple[ir.Value, ...]:
    """median.dim(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    rank = ctx.rank(self)
    if rank == 0:
        return self, ctx.constant(0, torch.int64)
    a = axis(dim, rank)
    given = none_missing(ctx, self, [a], called(ctx))
    if is_empty(ctx.sizes(self)):
        return tuple(ctx.op.Expand(ctx.constant(0, fake.dtype), ctx.shape(fake.shape)) for fake in ctx.out)
    value, position = statistic(ctx, ctx.cast(given, float_dtype(ctx.dtype(self))), a, ctx.sizes(self)[a], rank)
    value = ctx.cast(value, ctx.dtype(self))
    return (value, position) if keepdim else (ctx.op.Squeeze(value, [a]), ctx.op.Squeeze(position, [a]))


def _of_all(statistic: Statistic, ctx: LoweringContext, self: ir.Value) -> ir.Value:
    """median(Tensor self) -> Tensor"""
    dtype, sizes = ctx.dtype(self), ctx.sizes(self)
    # Without elements torch gives NaN, or the least integer.
    of_nothing = math.nan if dtype.is_floating_point else -(1 << 63) if dtype == torch.int64 else None
    if is_empty(sizes):
        if of_nothing is None:
            raise ctx.refuse("median of an empty integer tensor")
        return ctx.constant(of_nothing, ctx.out.dtype)
    op, count = ctx.op, ctx.fake(self).numel()
    x = ctx.cast(op.Reshape(self, [-1]), float_dtype(dtype))
    if not all(has_elements(size) for size in sizes):
        if of_nothing is None:
            raise ctx.refuse("median of an integer tensor that may be empty")
        # One such element where there is none.
        more = ctx.cast(op.Equal(op.Size(x), 0), torch.int64)
        assert x.dtype is not None
        filler = ctx.builder.constant(of_nothing, x.dtype)
        x = op.Concat(x, op.Expand(filler, op.Reshape(more, [1])), axis=0)
        count = torch.sym_max(count, 1)  # type: ignore[no-untyped-call]
    value, _ = statistic(ctx, x, 0, count, 1)
    return ctx.reshape(ctx.cast(value, ctx.out.dtype), [])


@lowering(aten.kthvalue.default)
def kthvalue(
    ctx: LoweringContext, self: ir.Value, k: Size, dim: int = -1, keepdim: bool = False
) -> tuple[ir.Value, ...]:
    """kthvalue(Tensor self, SymInt k, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    if ctx.rank(self) == 0:
        return sorted_along(ctx, self, k, dim, largest=False)
    a = axis(dim, ctx.rank(self))
    self = none_missing(ctx, self, [a], called(ctx))
    first = sorted_along(ctx, self, k, dim, largest=False)
    last = [cut(ctx, value, a, -1, sys.maxsize) for value in first]
    return tuple(last if keepdim else (ctx.op.Squeeze(value, [a]) for value in last))


# -- medians -----------------------------------------------------------------------------------------------------


def _middle(op: OpBuilder, x: ir.Value, a: int, half: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the lower median, `half` of the entries being up to it, without a nan."""
    values, positions = op.TopK(x, half, axis=a, largest=0, _outputs=2)
    return op.Slice(values, [-1], [sys.maxsize], [a]), op.Slice(positions, [-1], [sys.maxsize], [a])


def _median(ctx: LoweringContext, x: ir.Value, a: int, size: Size, rank: int) -> tuple[ir.Value, ir.Value]:
    half = ctx.shape([(size + 1) // 2])
    assert x.dtype is not None
    if not x.dtype.is_floating_point():
        return _middle(ctx.op, x, a, half)

    def with_nan(op: OpBuilder) -> Sequence[ir.Value]:
        nan = op.IsNaN(x)
        flag = op.Cast(nan, to=ir.DataType.INT32)
        some = op.Cast(op.ReduceMax(flag, [a], keepdims=1), to=ir.DataType.BOOL)
        value, position = _middle(op, op.Where(nan, math.inf, x), a, half)
        first = first_index(ctx, nan, a, size, rank, flags=flag, op=op)
        return op.Where(some, math.nan, value), op.Where(some, first, position)

    value, position = if_finite(ctx, x, lambda op: _middle(op, x, a, half), with_nan)
    return value, position


def _nanmedian(ctx: LoweringContext, x: ir.Value, a: int, size: Size, rank: int) -> tuple[ir.Value, ir.Value]:
    half, everything = ctx.shape([(size + 1) // 2]), ctx.shape([size])
    assert x.dtype is not None
    if not x.dtype.is_floating_point():
        return _middle(ctx.op, x, a, half)

    def with_nan(op: OpBuilder) -> Sequence[ir.Value]:
        values, positions = sorted_with_nan(op, x, a, everything, everything, largest=False)
        numbers = op.ReduceSum(op.Cast(op.Not(op.IsNaN(x)), to=ir.DataType.INT64), [a], keepdims=1)
        place = op.Div(op.Sub(op.Max(numbers, 1), 1), 2)
        return op.GatherElements(values, place, axis=a), op.GatherElements(positions, place, axis=a)

    value, position = if_finite(ctx, x, lambda op: _middle(op, x, a, half), with_nan)
    return value, position


register(aten.median.dim, functools.partial(_along, _median))
register(aten.median.default, functools.partial(_of_all, _median))
register(aten.nanmedian.dim, functools.partial(_along, _nanmedian))
register(aten.nanmedian.default, functools.partial(_of_all, _nanmedian))


# -- modes -------------------------------------------------------------------------------------------------------


@lowering(aten.mode.default)
def mode(ctx: LoweringContext, self: ir.Value, dim: int = -1, keepdim: bool = False) -> tuple[ir.Value, ...]:
    """mode(Tensor self, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)"""
    op, rank = ctx.op, ctx.rank(self)
    if rank == 0 or is_empty(ctx.sizes(self)):
        return _along(_median, ctx, self, dim, keepdim)
    a = axis(dim, rank)
    size = ctx.sizes(self)[a]
    self = none_missing(ctx, self, [a], called(ctx))
    values, positions = sorted_along(ctx, self, size, dim, largest=False)
    places = positions_along(ctx, a, size, rank)
    # Measure how far each sorted entry is from the first of its run of equals; the farthest ends the longest run.
    changes = op.Not(op.Equal(cut(ctx, values, a, 1, sys.maxsize), cut(ctx, values, a, 0, -1)))
    begins = op.Mul(op.Cast(changes, to=ir.DataType.INT64), cut(ctx, places, a, 1, sys.maxsize))
    begins = op.Concat(op.Mul(cut(ctx, positions, a, 0, 1), 0), begins, axis=a)
    run = prefix_scan(ctx, begins, a, ctx.sizes(self), lambda op, earlier, later: op.Max(earlier, later), 0)
    last = first_greatest(ctx, op.Cast(op.Sub(places, run), to=ir.DataType.INT32), a, size, rank)
    found = [op.GatherElements(of, last, axis=a) for of in (values, positions)]
    return tuple(found if keepdim else (op.Squeeze(one, [a]) for one in found))
