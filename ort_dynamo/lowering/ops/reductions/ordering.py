"""Sorting, positions of extremes, and reversals."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.memory.views import axis, cut
from ort_dynamo.lowering.ops.reductions.reduction import extremum, is_extremum
from ort_dynamo.lowering.recipes.branches import if_finite
from ort_dynamo.lowering.recipes.checks import called, none_missing
from ort_dynamo.lowering.recipes.first_index import first_index
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.torch_internals.kernels.operators import aten

# -- sorting -----------------------------------------------------------------------------------------------------


def sorted_along(
    ctx: LoweringContext, self: ir.Value, count: Size, dim: int, largest: bool, in_order: bool = True
) -> tuple[ir.Value, ir.Value]:
    """Return the first `count` values along `dim` and their positions, in a stable order."""
    op = ctx.op
    if ctx.rank(self) == 0:
        return op.Identity(self), ctx.constant(0, torch.int64)
    a = axis(dim, ctx.rank(self))
    if is_empty(ctx.sizes(self)) or (isinstance(count, int) and count == 0):
        # Defect empty_top_k.
        sizes = list(ctx.sizes(self))
        sizes[a] = count
        nothing = ctx.shape(sizes)
        return op.Expand(ctx.constant(0, ctx.dtype(self)), nothing), op.Expand(ctx.constant(0, torch.int64), nothing)
    kept = ctx.shape([count])

    def plain(op: OpBuilder) -> Sequence[ir.Value]:
        values, positions = op.TopK(x, kept, axis=a, largest=int(largest), sorted=int(in_order), _outputs=2)
        return values, positions

    if not ctx.dtype(self).is_floating_point:
        x = self
        values, positions = plain(op)
        return values, positions
    x = ctx.cast(self, float_dtype(ctx.dtype(self)))
    everything = ctx.shape([ctx.sizes(self)[a]])
    values, positions = if_finite(ctx, x, plain, lambda op: sorted_with_nan(op, x, a, everything, kept, largest))
    return ctx.cast(values, ctx.dtype(self)), positions


def sorted_with_nan(
    op: OpBuilder, x: ir.Value, a: int, everything: ir.Value, kept: ir.Value, largest: bool
) -> tuple[ir.Value, ir.Value]:
    """Return the first `kept` of `everything` along axis `a`, and their indices; nan is the largest value.

    It sorts twice, because TopK takes no nan, and nan has to stay apart from the infinities.
    """
    nan = op.IsNaN(x)
    _, first = op.TopK(op.Where(nan, math.inf, x), everything, axis=a, largest=int(largest), _outputs=2)
    nan = op.GatherElements(op.Cast(nan, to=ir.DataType.INT32), first, axis=a)
    _, second = op.TopK(nan, kept, axis=a, largest=int(largest), _outputs=2)
    positions = op.GatherElements(first, second, axis=a)
    return op.GatherElements(x, positions, axis=a), positions


@lowering(aten.topk.default)
def topk(
    ctx: LoweringContext, self: ir.Value, k: Size, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[ir.Value, ...]:
    """topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)"""  # noqa: E501
    return sorted_along(ctx, self, k, dim, largest, sorted)


@lowering(aten.sort.default)
def sort(ctx: LoweringContext, self: ir.Value, dim: int = -1, descending: bool = False) -> tuple[ir.Value, ...]:
    """sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""
    size = ctx.sizes(self)[dim] if ctx.rank(self) else 1
    return sorted_along(ctx, self, size, dim, descending)


@lowering(aten.sort.stable)
def sort_stable(
    ctx: LoweringContext, self: ir.Value, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[ir.Value, ...]:
    """sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"""  # noqa: E501
    return sort(ctx, self, dim, descending)


# -- positions of extremes ---------------------------------------------------------------------------------------


def _extreme(
    op_type: str, ctx: LoweringContext, self: ir.Value, dim: int | None = None, keepdim: bool = False
) -> ir.Value:
    """argmax(Tensor self, int? dim=None, bool keepdim=False) -> Tensor"""
    op = ctx.op
    axes = None if dim is None else [axis(dim, ctx.rank(self))]
    given = none_missing(ctx, self, axes, called(ctx)) if ctx.rank(self) else self
    if is_empty(ctx.sizes(self)):
        return op.Expand(ctx.constant(0, torch.int64), ctx.shape(ctx.out.shape))
    x = ctx.cast(given, float_dtype(ctx.dtype(self)))
    if dim is None or ctx.rank(self) == 0:
        x, a = op.Reshape(x, [-1]), 0
    else:
        a = axis(dim, ctx.rank(self))
    if ctx.target.has_defect("arg_max_of_equals"):
        flat = dim is None or ctx.rank(self) == 0
        sizes = (ctx.fake(self).numel(),) if flat else ctx.sizes(self)
        kept = extremum(ctx, f"Reduce{op_type.removeprefix('Arg')}", x, [a], True)
        return ctx.reshape(first_index(ctx, is_extremum(ctx, x, kept), a, sizes[a], len(sizes)), ctx.out.shape)
    if not ctx.dtype(self).is_floating_point:
        return ctx.reshape(_place(ctx, op_type, x, a), ctx.out.shape)

    def with_nan(op: OpBuilder) -> Sequence[ir.Value]:
        nan = op.Cast(op.IsNaN(x), to=ir.DataType.INT32)
        some = op.Cast(op.ReduceMax(nan, [a], keepdims=1), to=ir.DataType.BOOL)
        return [op.Where(some, op.ArgMax(nan, axis=a), getattr(op, op_type)(x, axis=a))]

    # The first nan is the extreme, both ways.
    (found,) = if_finite(ctx, x, lambda op: [getattr(op, op_type)(x, axis=a)], with_nan)
    return ctx.reshape(found, ctx.out.shape)


def _place(ctx: LoweringContext, op_type: str, x: ir.Value, a: int) -> ir.Value:
    if x.dtype == ir.DataType.INT64 and not ctx.target.takes(op_type, "", {"T": ir.DataType.INT64}):
        _, found = ctx.op.TopK(x, [1], axis=a, largest=int(op_type == "ArgMax"), _outputs=2)
        return found
    return getattr(ctx.op, op_type)(x, axis=a)


register(aten.argmax.default, functools.partial(_extreme, "ArgMax"))
register(aten.argmin.default, functools.partial(_extreme, "ArgMin"))


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


_FEW = 1 << 12
"""Maximum number of positions that become a constant."""


@lowering(aten.roll.default)
def roll(ctx: LoweringContext, self: ir.Value, shifts: Sequence[Size], dims: Sequence[int] = ()) -> ir.Value:
    """roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor"""
    sizes = ctx.sizes(self)
    if is_empty(ctx.sizes(self)) or not sizes:
        return self
    if not dims:
        flat = ctx.op.Reshape(self, [-1])
        return ctx.reshape(_roll(ctx, flat, 0, shifts[0], ctx.fake(self).numel()), sizes)
    axes = [axis(dim, len(sizes)) for dim in dims]
    if len(set(axes)) > 1 and not ctx.target.facts.walks_entries:
        steps = [shift for shift in shifts if isinstance(shift, int)]
        span = [size for size in sizes[min(axes) : max(axes) + 1] if isinstance(size, int)]
        if len(steps) == len(shifts) and len(span) == max(axes) - min(axes) + 1 and math.prod(span) <= _FEW:
            return _roll_at_once(ctx, self, steps, axes, span)
    value = self
    for shift, a in zip(shifts, axes, strict=True):
        value = _roll(ctx, value, a, shift, sizes[a])
    return value


def _roll_at_once(
    ctx: LoweringContext, value: ir.Value, shifts: Sequence[int], axes: Sequence[int], span: Sequence[int]
) -> ir.Value:
    """Roll several axes by one lookup, along all from the first to the last, of the sizes `span`, as one axis."""
    sizes, first, count = ctx.sizes(value), min(axes), math.prod(span)
    positions = np.roll(np.arange(count).reshape(span), shifts, [a - first for a in axes])
    rows = ctx.reshape(value, [*sizes[:first], count, *sizes[first + len(span) :]])
    return ctx.reshape(ctx.op.Gather(rows, ctx.ints(positions.flatten().tolist()), axis=first), sizes)


def _roll(ctx: LoweringContext, value: ir.Value, a: int, shift: Size, size: Size) -> ir.Value:
    start: Size = -shift % size  # type: ignore[operator]
    if isinstance(start, int) and start == 0:
        return value
    if isinstance(start, int) and isinstance(size, int) and size <= _FEW and not ctx.target.facts.walks_entries:
        return ctx.op.Gather(value, ctx.ints([*range(start, size), *range(start)]), axis=a)  # one launch, not three
    return ctx.op.Concat(cut(ctx, value, a, start, sys.maxsize), cut(ctx, value, a, 0, start), axis=a)
