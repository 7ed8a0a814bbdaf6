"""Gather and scatter along one dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number, Size, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.ops.memory.views import axis, size_is_zero
from ort_dynamo.lowering.recipes.branches import chooses, either
from ort_dynamo.lowering.recipes.positions import from_either_end, from_start, size_to_check
from ort_dynamo.lowering.recipes.promotion import accumulator
from ort_dynamo.lowering.recipes.scatter_indices import (
    ScatterIndices,
    flat_places,
    of_entries,
    of_rows,
    own_dimensions,
    slice_numbers,
    undo_expand,
)
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.lowering.symbols import same_size
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import is_unbacked

_REDUCTIONS = {
    None: "none",
    "add": "add",
    "sum": "add",
    "mean": "add",
    "multiply": "mul",
    "prod": "mul",
    "amax": "max",
    "amin": "min",
}
"""torch's names of reductions -> ONNX's."""


def _at_least_1d(ctx: LoweringContext, value: ir.Value) -> ir.Value:
    return value if ctx.rank(value) else ctx.reshape(value, [1])


def _sizes_1d(ctx: LoweringContext, value: ir.Value) -> list[Size]:
    return list(ctx.sizes(value)) or [1]


_WIDE = 8
"""Entries of a slice from which on a CPU's Gather takes less time for it than GatherElements for its entries."""


@lowering(aten.gather.default)
def gather(ctx: LoweringContext, self: ir.Value, dim: int, index: ir.Value, sparse_grad: bool = False) -> ir.Value:
    """gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor"""
    if any(map(size_is_zero, ctx.sizes(index))):  # of any rank
        return filled(ctx, 0)
    place = axis(dim, ctx.rank(self))
    if (found := _slices_at(ctx, self, place, index)) is not None:
        return found
    size = ctx.sizes(self)[place] if ctx.rank(self) else 1
    data, where = _at_least_1d(ctx, self), from_start(ctx, _at_least_1d(ctx, index), size)
    result: ir.Value = ctx.op.GatherElements(data, where, axis=place)
    return result if ctx.rank(index) else ctx.reshape(result, [])


def _slices_at(ctx: LoweringContext, data: ir.Value, place: int, index: ir.Value) -> ir.Value | None:
    """Gather slices instead of entries, where `index` was expanded from one that names them; else return None."""
    sizes, counts = ctx.sizes(data), ctx.sizes(index)
    if (numbers := slice_numbers(ctx, sizes, place, index)) is not None:
        return ctx.op.Gather(data, from_start(ctx, numbers, sizes[place]), axis=place)
    first, end = own_dimensions(ctx, sizes, place, index)
    shared = math.prod((*counts[:first], *counts[end:]))
    walks = ctx.target.facts.walks_entries  # GatherElements takes less than Gather for an entry, but for no slice
    is_few = isinstance(shared, int) and shared < (_WIDE if walks else 2)
    if is_few or (walks and first) or is_unbacked(*sizes, *counts):
        return None
    between, own = sizes[first:end], undo_expand(ctx, index, first, end)
    places = flat_places(ctx, between, place - first, from_start(ctx, own, sizes[place]), counts[first:end])
    slices = ctx.reshape(data, [*sizes[:first], math.prod(between), *sizes[end:]])
    return ctx.reshape(ctx.op.Gather(slices, ctx.op.Reshape(places, [-1]), axis=first), counts)


# -- an index for each entry -------------------------------------------------------------------------------------


@lowering(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter(
    ctx: LoweringContext,
    self: ir.Value,
    dim: int,
    index: ir.Value,
    src: ir.Value | Number,
    *,
    reduce: str | None = None,
) -> ir.Value:
    """scatter.reduce(Tensor self, int dim, Tensor index, Tensor src, *, str reduce) -> Tensor"""
    return _scatter(ctx, self, dim, index, src, reduce)


@lowering(aten.scatter_add.default)
def scatter_add(ctx: LoweringContext, self: ir.Value, dim: int, index: ir.Value, src: ir.Value) -> ir.Value:
    """scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor"""
    return _scatter(ctx, self, dim, index, src, "sum")


@lowering(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: LoweringContext,
    self: ir.Value,
    dim: int,
    index: ir.Value,
    src: ir.Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> ir.Value:
    """scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True) -> Tensor"""  # noqa: E501
    return _scatter(ctx, self, dim, index, src, reduce, include_self)


def _scatter(
    ctx: LoweringContext,
    self: ir.Value,
    dim: int,
    index: ir.Value,
    src: ir.Value | Number,
    reduce: str | None,
    include_self: bool = True,
) -> ir.Value:
    """`src`, as far as `index` reaches, scattered into `self`."""
    if any(map(size_is_zero, ctx.sizes(index))):  # of any rank
        return self
    sizes = _sizes_1d(ctx, index)
    if isinstance(src, ir.Value):
        source = _at_least_1d(ctx, src)
        if not all(map(same_size, sizes, _sizes_1d(ctx, src))):
            source = ctx.op.Slice(source, ctx.ints([0] * len(sizes)), ctx.shape(sizes))
    else:
        source = ctx.op.Expand(ctx.element(src, ctx.out.dtype), ctx.shape(sizes))
    data_sizes, place = _sizes_1d(ctx, self), axis(dim, ctx.rank(self))
    rows = slice_numbers(ctx, data_sizes, place, index) if place == 0 and ctx.target.facts.walks_entries else None
    if rows is not None:
        places = of_rows(ctx, data_sizes, rows)
    else:
        places = of_entries(ctx, data_sizes, place, _at_least_1d(ctx, index), sizes)
    return _reduced(ctx, self, places, source, reduce, include_self)


def _reduced(
    ctx: LoweringContext,
    self: ir.Value,
    places: ScatterIndices,
    source: ir.Value,
    reduce: str | None,
    include_self: bool = True,
) -> ir.Value:
    """`source`, at least 1-D, scattered into `self` with torch's reductions."""
    op = ctx.op
    dtype = ctx.out.dtype
    if reduce is not None:
        dtype = accumulator(dtype)
    data = ctx.cast(_at_least_1d(ctx, self), dtype)
    source = ctx.cast(source, dtype)
    if not include_self:
        neutral = ctx.constant(_neutral(reduce, dtype), dtype)
        data = places.write(op, data, op.Expand(neutral, op.Shape(source)))
    if reduce in ("amax", "amin") and dtype.is_floating_point:
        result = _greatest_or_least(ctx, places, data, source, _REDUCTIONS[reduce])
    else:
        result = places.write(op, data, source, _REDUCTIONS[reduce])
    if reduce == "mean":
        result = _divide_by_count(ctx, self, places, source, result, include_self)
    result = ctx.cast(result, ctx.out.dtype)
    return result if ctx.rank(self) else ctx.reshape(result, [])


def _greatest_or_least(
    ctx: LoweringContext, places: ScatterIndices, data: ir.Value, source: ir.Value, reduction: str
) -> ir.Value:
    """Return a maximum or minimum, and NaN where one takes part: comparisons lose it (defect comparisons_lose_nan)."""

    def reduced(op: OpBuilder) -> list[ir.Value]:
        return [places.write(op, data, source, reduction)]

    def with_nan(op: OpBuilder) -> list[ir.Value]:
        here, there = (op.Cast(op.IsNaN(value), to=ir.DataType.INT32) for value in (data, source))
        seen = op.Cast(places.write(op, here, there, "max"), to=ir.DataType.BOOL)
        return [op.Where(seen, math.nan, *reduced(op))]

    op = ctx.op
    if not chooses(ctx):
        return with_nan(op)[0]
    total = op.Add(op.ReduceSum(data, keepdims=0), op.ReduceSum(source, keepdims=0))  # NaN if any entry is
    (result,) = either(ctx, op.IsNaN(total), with_nan, reduced)
    return result


def _divide_by_count(
    ctx: LoweringContext,
    self: ir.Value,
    places: ScatterIndices,
    source: ir.Value,
    total: ir.Value,
    include_self: bool,
) -> ir.Value:
    op = ctx.op
    dtype = accumulator(ctx.out.dtype)
    one = ctx.constant(1, dtype)
    if places.rows is None:
        none = zeros(ctx, total, _sizes_1d(ctx, self))
        count = places.write(op, none, op.Expand(one, op.Shape(source)), "add")
    else:
        height, *around = _sizes_1d(ctx, self)
        none, ones = zeros(ctx, total, [height]), op.Expand(one, op.Shape(places.rows))
        count = op.ScatterElements(none, places.rows, ones, axis=0, reduction="add")
        count = ctx.reshape(count, [height, *[1] * len(around)])
    count = op.Add(count, one) if include_self else op.Max(count, one)
    if dtype.is_floating_point:
        return op.Div(total, count)
    return op.Div(op.Sub(total, op.Mod(total, count)), count)  # rounded down


def _neutral(reduce: str | None, dtype: torch.dtype) -> int | float:
    """Give the result of reducing no element."""
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype.is_floating_point:
        return float("-inf") if reduce == "amax" else float("inf")
    return torch.iinfo(dtype).min if reduce == "amax" else torch.iinfo(dtype).max


# -- an index for each slice -------------------------------------------------------------------------------------


def _slices(ctx: LoweringContext, self: ir.Value, dim: int, index: ir.Value, sizes: Sequence[Size]) -> ScatterIndices:
    """Return the slices of `self` along `dim` that a 1-D `index` names, for a source of shape `sizes`."""
    data_sizes, place = _sizes_1d(ctx, self), axis(dim, ctx.rank(self))
    if place == 0 and ctx.rank(self) > 1 and ctx.target.facts.walks_entries:
        return of_rows(ctx, data_sizes, ctx.reshape(index, [-1]))
    column = ctx.op.Reshape(index, ctx.ints([-1] + [1] * (len(data_sizes) - place - 1)))
    return of_entries(ctx, data_sizes, place, ctx.op.Expand(column, ctx.shape(sizes)), sizes)


@lowering(aten.index_add.default)
def index_add(
    ctx: LoweringContext, self: ir.Value, dim: int, index: ir.Value, source: ir.Value, *, alpha: Number = 1
) -> ir.Value:
    """index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor"""
    ctx.check_range(alpha)
    dtype = accumulator(ctx.out.dtype)
    scaled = ctx.cast(_at_least_1d(ctx, source), dtype)
    if not (isinstance(alpha, (int, float)) and alpha == 1):
        scaled = ctx.op.Mul(scaled, ctx.scalar(alpha, dtype))
    return _reduced(ctx, self, _slices(ctx, self, dim, index, _sizes_1d(ctx, source)), scaled, "sum")


@lowering(aten.index_reduce.default)
def index_reduce(
    ctx: LoweringContext,
    self: ir.Value,
    dim: int,
    index: ir.Value,
    source: ir.Value,
    reduce: str,
    *,
    include_self: bool = True,
) -> ir.Value:
    """index_reduce(Tensor self, int dim, Tensor index, Tensor source, str reduce, *, bool include_self=True) -> Tensor"""  # noqa: E501
    places = _slices(ctx, self, dim, index, _sizes_1d(ctx, source))
    return _reduced(ctx, self, places, _at_least_1d(ctx, source), reduce, include_self)


@lowering(aten.index_copy.default)
def index_copy(ctx: LoweringContext, self: ir.Value, dim: int, index: ir.Value, source: ir.Value) -> ir.Value:
    """index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor"""
    size = size_to_check(ctx, _sizes_1d(ctx, self)[axis(dim, ctx.rank(self))])
    return _replace(ctx, self, dim, from_start(ctx, index, size), _at_least_1d(ctx, source), _sizes_1d(ctx, source))


def _index_fill(ctx: LoweringContext, self: ir.Value, dim: int, index: ir.Value, value: ir.Value | Number) -> ir.Value:
    """index_fill.int_Scalar(Tensor self, int dim, Tensor index, Scalar value) -> Tensor"""
    op, sizes, place = ctx.op, _sizes_1d(ctx, self), axis(dim, ctx.rank(self))
    count, number = ctx.fake(index).numel(), from_either_end(ctx, index, size_to_check(ctx, sizes[place]))
    # The only operator here whose negative indices count from the end.
    index = op.Where(op.Less(number, 0), op.Add(number, ctx.scalar(sizes[place], torch.int64)), number)
    index = from_start(ctx, index)
    sizes[place] = count
    dtype = ctx.out.dtype
    filler = ctx.cast(value, dtype) if isinstance(value, ir.Value) else ctx.element(value, dtype)
    return _replace(ctx, self, dim, index, op.Expand(filler, ctx.shape(sizes)), sizes)


register(aten.index_fill.int_Scalar, _index_fill)
register(aten.index_fill.int_Tensor, _index_fill)


def _replace(
    ctx: LoweringContext, self: ir.Value, dim: int, index: ir.Value, source: ir.Value, sizes: Sequence[Any]
) -> ir.Value:
    """Slices of `self` along `dim` replaced by those of `source`, which has the shape `sizes`."""
    if is_empty(ctx.sizes(self)):
        return self  # torch reads no index then, and takes any
    place = axis(dim, ctx.rank(self))
    if place == 0 and ctx.rank(self) > 0:
        # Whole rows: one copy each.
        return ctx.op.ScatterND(self, ctx.op.Reshape(index, [-1, 1]), source)
    return _reduced(ctx, self, _slices(ctx, self, dim, index, sizes), source, None)
