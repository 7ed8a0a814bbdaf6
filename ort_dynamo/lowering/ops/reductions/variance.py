"""Variances and standard deviations."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.elementwise.unary import square_root
from ort_dynamo.lowering.ops.reductions.reduction import Dims, axes_of, count_of, sum_of_squares
from ort_dynamo.lowering.recipes.branches import all_finite, either
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.accurate_sum import total
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten


@lowering(aten.var.correction)
def var(
    ctx: LoweringContext, self: ir.Value, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> ir.Value:
    """var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    variance, _ = _variance(ctx, self, dim, correction, keepdim)
    return ctx.cast(variance, ctx.out.dtype)


@lowering(aten.std.correction)
def std(
    ctx: LoweringContext, self: ir.Value, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> ir.Value:
    """std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    variance, _ = _variance(ctx, self, dim, correction, keepdim, for_root=True)
    return ctx.cast(square_root(ctx, variance), ctx.out.dtype)


@lowering(aten.var_mean.correction)
def var_mean(
    ctx: LoweringContext, self: ir.Value, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[ir.Value, ...]:
    """var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False)
    -> (Tensor, Tensor)
    """
    variance, average = _variance(ctx, self, dim, correction, keepdim)
    return ctx.cast(variance, ctx.out[0].dtype), ctx.cast(average, ctx.out[1].dtype)


@lowering(aten.std_mean.correction)
def std_mean(
    ctx: LoweringContext, self: ir.Value, dim: Dims = None, *, correction: Number | None = None, keepdim: bool = False
) -> tuple[ir.Value, ...]:
    """std_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False)
    -> (Tensor, Tensor)
    """
    variance, average = _variance(ctx, self, dim, correction, keepdim, for_root=True)
    return ctx.cast(square_root(ctx, variance), ctx.out[0].dtype), ctx.cast(average, ctx.out[1].dtype)


def _variance(
    ctx: LoweringContext,
    self: ir.Value,
    dim: Dims,
    correction: Number | None,
    keepdim: bool,
    *,
    for_root: bool = False,
) -> tuple[ir.Value, ir.Value]:
    """Variance and mean in a dtype for accumulation: sum((x - mean)²) / max(n - correction, 0)."""
    op, dtype = ctx.op, float_dtype(ctx.dtype(self))
    x = ctx.cast(self, dtype)
    axes = axes_of(dim, ctx.rank(self)) if ctx.rank(self) else []
    # The variance of no numbers is NaN, also with a correction below 0.
    size, less = count_of(ctx, self, axes), 1 if correction is None or is_empty(ctx.sizes(self)) else correction
    count = ctx.scalar(size, dtype)
    if not axes:
        centred, average = op.Sub(x, x), x
        squares = centred
    else:
        kept = op.Div(total(ctx, x, ctx.sizes(self), axes, True, rows=True), count)
        centred = op.Sub(x, kept)
        squares = sum_of_squares(ctx, centred, ctx.sizes(self), axes, keepdim)
        average = kept if keepdim else op.Squeeze(kept, axes)
    variance = op.Div(squares, op.Max(op.Sub(count, ctx.scalar(less, dtype)), 0.0))
    if not axes or dtype == torch.float64 or not ctx.target.facts.accumulates_in_double:
        return variance, average
    divisors = ctx.scalar(size, torch.float64), ctx.scalar(less, torch.float64)
    wide, wide_average = either(
        ctx,
        _is_exact(ctx, variance, for_root),
        lambda op: [op.Cast(value, to=ir.DataType.DOUBLE) for value in (variance, average)],
        lambda op: _in_double(op, x, divisors, axes, keepdim),
    )
    return wide, wide_average


def _is_exact(ctx: LoweringContext, variance: ir.Value, for_root: bool) -> ir.Value:
    """Compute, as a 0-d bool, whether no sum of squares has overflowed, nor lost digits that its root would show."""
    op, finite = ctx.op, all_finite(ctx, variance)
    if not for_root:
        return finite
    lost = op.Cast(op.Less(variance, _TINY), to=ir.DataType.INT64)
    return op.And(finite, op.Equal(op.ReduceSum(lost, keepdims=0), 0))


_TINY = 2.0**-100
"""Smaller variances may come from squares that are subnormal numbers of float32."""


def _in_double(
    op: OpBuilder, x: ir.Value, divisors: tuple[ir.Value, ir.Value], axes: Sequence[int], keepdim: bool
) -> list[ir.Value]:
    """Compute variance and mean in float64; `divisors` are the count of numbers and the correction."""
    (count, less), wide = divisors, op.Cast(x, to=ir.DataType.DOUBLE)
    average = op.Div(op.ReduceSum(wide, axes, keepdims=1), count)
    centred = op.Sub(wide, average)
    squares = op.ReduceSum(op.Mul(centred, centred), axes, keepdims=int(keepdim))
    variance = op.Div(squares, op.Max(op.Sub(count, less), 0.0))
    return [variance, average if keepdim else op.Squeeze(average, axes)]
