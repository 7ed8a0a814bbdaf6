"""Running sums, products, extrema and log-sum-exps along one dimension."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.elementwise.unary import is_float
from ort_dynamo.lowering.ops.memory.views import axis, size_is_zero
from ort_dynamo.lowering.recipes.positions import positions_along
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.prefix_scan import prefix_scan
from ort_dynamo.lowering.recipes.sums.running_sum import running_sum
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.torch_internals.kernels.operators import aten


@lowering(aten.cumsum.default)
def cumsum(ctx: LoweringContext, self: ir.Value, dim: int, *, dtype: torch.dtype | None = None) -> ir.Value:
    """cumsum(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    accumulator = _accumulator(ctx)
    if not ctx.rank(self):
        return ctx.cast(ctx.cast(self, accumulator), ctx.out.dtype)
    rank, sizes = ctx.rank(self), ctx.sizes(self)
    a = axis(dim, rank)
    if not _walks_entries(ctx, sizes, a):
        return ctx.cast(ctx.op.CumSum(ctx.cast(self, accumulator), ctx.constant(a, torch.int64)), ctx.out.dtype)
    if all(isinstance(size, int) and size == 1 for size in sizes[:-1]):
        summed = running_sum(ctx, ctx.op.Reshape(ctx.cast(self, accumulator), [-1]))
        return ctx.op.Reshape(ctx.cast(summed, ctx.out.dtype), ctx.op.Shape(self))
    # Over the first of several dimensions the kernel adds whole rows. Transposed are the narrow dtypes.
    lines = ctx.op.Transpose(self, perm=[rank - 1, *range(rank - 1)])
    summed = ctx.op.CumSum(ctx.cast(lines, accumulator), ctx.constant(0, torch.int64))
    return ctx.op.Transpose(ctx.cast(summed, ctx.out.dtype), perm=[*range(1, rank), 0])


_SMALL = 1 << 12
"""Entries up to which the kernel takes no longer than the nodes that spare it."""


def _walks_entries(ctx: LoweringContext, sizes: Sequence[Size], a: int) -> bool:
    """Check whether CumSum would step from entry to entry, which takes the CPU's kernels 3 to 8 ns each."""
    if not ctx.target.facts.walks_entries or a != len(sizes) - 1 or any(map(size_is_zero, sizes)):
        return False
    count = math.prod(sizes)
    if isinstance(count, int) and count <= _SMALL:
        return False
    return ctx.target.has_defect("slow_running_sum_of_integers") or ctx.out.dtype.is_floating_point


def _accumulator(ctx: LoweringContext) -> torch.dtype:
    """Return the dtype torch's kernels accumulate in: on the CPU, float64 for every floating-point dtype."""
    dtype = float_dtype(ctx.out.dtype)
    wide = dtype.is_floating_point and ctx.target.facts.accumulates_in_double
    return torch.float64 if wide else dtype


@lowering(aten.cumprod.default)
def cumprod(ctx: LoweringContext, self: ir.Value, dim: int, *, dtype: torch.dtype | None = None) -> ir.Value:
    """cumprod(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor"""
    within = _accumulator(ctx)
    if not ctx.rank(self):
        return ctx.cast(ctx.cast(self, within), ctx.out.dtype)
    a = axis(dim, ctx.rank(self))
    result = prefix_scan(ctx, self, a, ctx.sizes(self), lambda op, earlier, later: op.Mul(earlier, later), 1, within)
    return ctx.cast(result, ctx.out.dtype)


# -- extrema -----------------------------------------------------------------------------------------------------


def _running_extremum(op_type: str, ctx: LoweringContext, self: ir.Value, dim: int) -> tuple[ir.Value, ir.Value | None]:
    """cummax(Tensor self, int dim) -> (Tensor values, Tensor indices)"""
    op, rank = ctx.op, ctx.rank(self)
    if rank == 0:
        return op.Identity(self), ctx.constant(0, torch.int64)
    a = axis(dim, rank)
    sizes = ctx.sizes(self)
    size = sizes[a]
    x = ctx.cast(self, float_dtype(ctx.dtype(self)))
    extrema = prefix_scan(
        ctx, x, a, sizes, lambda op, earlier, later: getattr(op, op_type)(earlier, later), _neutral(op_type, x)
    )
    values = ctx.cast(extrema, ctx.dtype(self))
    if 1 not in ctx.used:
        return values, None
    if isinstance(size, int) and size == 0:
        return values, op.Expand(ctx.constant(0, torch.int64), ctx.shape(ctx.sizes(self)))
    # The last index so far that holds the extremum. A nan is the extremum, and equal to nothing.
    holds = op.Equal(x, extrema)
    if is_float(x):
        holds = op.Or(holds, op.IsNaN(x))
    # Indices are floats, if floats hold them exactly: a maximum of int64 takes six times as long.
    number = torch.float32 if isinstance(size, int) and size <= 1 << 24 else torch.int64
    along = ctx.cast(positions_along(ctx, a, size, rank), number)
    places = op.Mul(op.Cast(holds, to=onnx_dtype(number)), along)
    last = prefix_scan(ctx, places, a, sizes, lambda op, earlier, later: op.Max(earlier, later), 0)
    return values, op.Cast(last, to=ir.DataType.INT64)


def _neutral(op_type: str, value: ir.Value) -> float:
    """Give the neutral element of a Max or Min in the dtype of `value`."""
    if is_float(value):
        return -math.inf if op_type == "Max" else math.inf
    assert value.dtype is not None
    if value.dtype == ir.DataType.BOOL:
        return int(op_type != "Max")
    return int(value.dtype.min if op_type == "Max" else value.dtype.max)


register(aten.cummax.default, functools.partial(_running_extremum, "Max"))
register(aten.cummin.default, functools.partial(_running_extremum, "Min"))


# -- log-sum-exp -------------------------------------------------------------------------------------------------


@lowering(aten.logcumsumexp.default)
def logcumsumexp(ctx: LoweringContext, self: ir.Value, dim: int) -> ir.Value:
    """logcumsumexp(Tensor self, int dim) -> Tensor"""
    x = ctx.cast(self, _accumulator(ctx))
    if ctx.rank(self):
        a = axis(dim, ctx.rank(self))
        x = prefix_scan(ctx, x, a, ctx.sizes(self), _log_add_exp, -math.inf)
    return ctx.cast(x, ctx.out.dtype)


def _log_add_exp(op: OpBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """high + log(1 + exp(low - high)), with the logarithm of Goldberg 1991, theorem 4."""
    high, low = op.Max(a, b), op.Min(a, b)
    small = op.Exp(op.Sub(low, high))
    u = op.Add(small, 1.0)
    logarithm = op.Where(op.Equal(u, 1.0), small, op.Mul(op.Log(u), op.Div(small, op.Sub(u, 1.0))))
    # Equal infinities have no difference.
    return op.Add(high, op.Where(op.Equal(high, low), math.log(2), logarithm))
