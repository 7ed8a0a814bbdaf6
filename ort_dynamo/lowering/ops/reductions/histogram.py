"""Histograms of one and of several dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext, Number, is_empty
from ort_dynamo.lowering.ops.reductions.reduction import extremum
from ort_dynamo.lowering.ops.reductions.search import places_among
from ort_dynamo.lowering.recipes.checks import stop_if
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import known_true

Places = Callable[[LoweringContext, ir.Value, ir.Value, int], ir.Value]
"""places(ctx, x, edges, count): the index of each entry's bin, of `count` bins, as int64; no entry is outside."""


@lowering(aten.histc.default)
def histc(ctx: LoweringContext, self: ir.Value, bins: int = 100, min: Number = 0, max: Number = 0) -> ir.Value:
    """histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor"""
    op = ctx.op
    dtype = ctx.dtype(self)
    if dtype not in (torch.float32, torch.float64):
        raise ctx.refuse("histogram of integers or 16-bit floats")
    x = op.Reshape(self, [-1])
    none = zeros(ctx, x, [bins])
    if is_empty(ctx.sizes(self)):
        return none
    if not all(math.isfinite(end) for end in (min, max) if isinstance(end, (int, float))):
        raise ctx.refuse("torch refuses a range that is not finite")
    low, high = ctx.scalar(min, dtype), ctx.scalar(max, dtype)
    if not known_true(min != max):
        given = op.Not(op.Equal(low, high))
        least, greatest = (extremum(ctx, reduction, x, [0], True) for reduction in ("ReduceMin", "ReduceMax"))
        least = _finite(ctx, least, greatest, "torch.histc: the range is not finite", 1)
        same, (below, above) = op.Equal(least, greatest), _around(ctx, least, dtype)
        low = op.Where(given, low, op.Where(same, below, least))
        high = op.Where(given, high, op.Where(same, above, greatest))
    width = op.Sub(high, low)
    inside = op.And(op.GreaterOrEqual(x, low), op.LessOrEqual(x, high))
    inside = op.And(inside, op.Less(width, math.inf))  # torch's edges are NaN else
    scaled = op.Div(op.Mul(op.Sub(x, low), float(bins)), width)
    place = op.Cast(op.Where(inside, scaled, 0.0), to=onnx_dtype(torch.int64))
    place = op.Clip(place, 0, bins - 1)  # the last bin holds its upper end; the first one, quotients that are no number
    ones = ctx.cast(inside, dtype)
    return op.ScatterElements(none, place, ones, axis=0, reduction="add")


def _around(ctx: LoweringContext, x: ir.Value, dtype: torch.dtype) -> tuple[ir.Value, ir.Value]:
    """Return finite numbers on either side of `x`: 1 away, or the nearest ones if those are farther away."""
    op, limits = ctx.op, torch.finfo(dtype)
    # This part of x rounds to the next number at any size (Rump et al., "Computing predecessor and successor").
    step = op.Max(op.Mul(op.Abs(x), limits.eps / 2 * (1 + limits.eps)), 1.0)
    below, above = (op.Clip(end, limits.min, limits.max) for end in (op.Sub(x, step), op.Add(x, step)))
    return below, above


def _finite(ctx: LoweringContext, low: ir.Value, high: ir.Value, words: str, rank: int) -> ir.Value:
    """Check that `low` and `high`, of one element each, are finite; the session stops if not. Give `low`."""
    op = ctx.op
    within = op.And(op.Less(op.Abs(low), math.inf), op.Less(op.Abs(high), math.inf))
    wrong = op.Not(op.Reshape(within, []) if rank else within)
    return stop_if(ctx, wrong, low, words, rank)


# -- bins given by their edges -----------------------------------------------------------------------------------


@lowering(aten.histogram.bin_ct)
def histogram_bin_ct(
    ctx: LoweringContext,
    self: ir.Value,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: ir.Value | None = None,
    density: bool = False,
) -> tuple[ir.Value, ...]:
    """histogram.bin_ct(Tensor self, int bins=100, *, float[]? range=None, Tensor? weight=None, bool density=False) -> (Tensor hist, Tensor bin_edges)"""  # noqa: E501
    edges = _even_edges(ctx, self, [ctx.op.Reshape(self, [-1])], [bins], range)
    counts = _histogram(ctx, self, [ctx.op.Reshape(self, [-1])], edges, [bins], weight, density, _even_places)
    return counts, edges[0]


@lowering(aten.histogram.bins_tensor)
def histogram_bins_tensor(
    ctx: LoweringContext, self: ir.Value, bins: ir.Value, *, weight: ir.Value | None = None, density: bool = False
) -> tuple[ir.Value, ...]:
    """histogram.bins_tensor(Tensor self, Tensor bins, *, Tensor? weight=None, bool density=False) -> (Tensor hist, Tensor bin_edges)"""  # noqa: E501
    counts = _given_edges(ctx, self, [bins], [ctx.op.Reshape(self, [-1])], weight, density)
    return counts, bins


@lowering(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(
    ctx: LoweringContext,
    self: ir.Value,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: ir.Value | None = None,
    density: bool = False,
) -> tuple[ir.Value, ...]:
    """_histogramdd_bin_edges(Tensor self, int[] bins, *, float[]? range=None, Tensor? weight=None, bool density=False) -> Tensor[]"""  # noqa: E501
    return tuple(_even_edges(ctx, self, _columns(ctx, self, len(bins)), bins, range))


@lowering(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_bin_cts(
    ctx: LoweringContext,
    self: ir.Value,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: ir.Value | None = None,
    density: bool = False,
) -> ir.Value:
    """_histogramdd_from_bin_cts(Tensor self, int[] bins, *, float[]? range=None, Tensor? weight=None, bool density=False) -> Tensor"""  # noqa: E501
    columns = _columns(ctx, self, len(bins))
    edges = _even_edges(ctx, self, columns, bins, range)
    return _histogram(ctx, self, columns, edges, bins, weight, density, _even_places)


@lowering(aten._histogramdd_from_bin_tensors.default)
def histogramdd_from_bin_tensors(
    ctx: LoweringContext,
    self: ir.Value,
    bins: Sequence[ir.Value],
    *,
    weight: ir.Value | None = None,
    density: bool = False,
) -> ir.Value:
    """_histogramdd_from_bin_tensors(Tensor self, Tensor[] bins, *, Tensor? weight=None, bool density=False) -> Tensor"""  # noqa: E501
    return _given_edges(ctx, self, bins, _columns(ctx, self, len(bins)), weight, density)


def _columns(ctx: LoweringContext, self: ir.Value, count: int) -> list[ir.Value]:
    """Return the coordinates of the points along the last dimension of `self`, each flat."""
    op = ctx.op
    points = op.Reshape(self, [-1, count]) if not is_empty(ctx.sizes(self)) else ctx.reshape(self, [0, count])
    return [op.Gather(points, ctx.constant(index, torch.int64), axis=1) for index in range(count)]


def _even_edges(
    ctx: LoweringContext,
    self: ir.Value,
    columns: Sequence[ir.Value],
    bins: Sequence[int],
    span: Sequence[float] | None,
) -> list[ir.Value]:
    """Return the edges of bins of equal width for each coordinate, over `span` or all that there is."""
    op, dtype = ctx.op, _dtype(ctx, self)
    found = []
    for index, (column, count) in enumerate(zip(columns, bins, strict=True)):
        if span is not None:
            low, high = (ctx.constant(end, dtype) for end in span[2 * index : 2 * index + 2])
        elif is_empty(ctx.sizes(self)):
            low, high = ctx.constant(0.0, dtype), ctx.constant(1.0, dtype)
        else:
            low, high = (extremum(ctx, reduction, column, [0], False) for reduction in ("ReduceMin", "ReduceMax"))
            low = _finite(ctx, low, high, f"torch.histogramdd: the range of dimension {index} is not finite", 0)
        same = op.Equal(low, high)
        low, high = op.Where(same, op.Sub(low, 0.5), low), op.Where(same, op.Add(high, 0.5), high)
        # torch.linspace computes from both ends, too.
        step = op.Div(op.Sub(high, low), float(count))
        places = ctx.builder.constant(np.arange(count + 1), onnx_dtype(dtype))
        front = op.Add(low, op.Mul(places, step))
        back = op.Sub(high, op.Mul(op.Sub(float(count), places), step))
        found.append(op.Where(op.Less(places, float((count + 1) // 2)), front, back))
    return found


def _given_edges(
    ctx: LoweringContext,
    self: ir.Value,
    edges: Sequence[ir.Value],
    columns: Sequence[ir.Value],
    weight: ir.Value | None,
    density: bool,
) -> ir.Value:
    sizes = ctx.static([ctx.fake(edge).numel() for edge in edges], "the number of bins")
    bins = [size - 1 for size in sizes]
    if any(count < 1 for count in bins):
        raise ctx.refuse("histogram with 0 bins")
    return _histogram(ctx, self, columns, edges, bins, weight, density, _searched_places)


def _dtype(ctx: LoweringContext, self: ir.Value) -> torch.dtype:
    dtype = ctx.dtype(self)
    if dtype not in (torch.float32, torch.float64):
        raise ctx.refuse(f"histogram of {dtype}")
    return dtype


def _histogram(
    ctx: LoweringContext,
    self: ir.Value,
    columns: Sequence[ir.Value],
    edges: Sequence[ir.Value],
    bins: Sequence[int],
    weight: ir.Value | None,
    density: bool,
    places: Places,
) -> ir.Value:
    """Count the points in each bin, or sum their weights; the last bin holds its upper end."""
    op, dtype = ctx.op, _dtype(ctx, self)
    every = math.prod(bins)
    counts = zeros(ctx, self, [every + 1])  # the last one is for elements outside all bins
    if not is_empty(ctx.sizes(self)):
        place, inside = None, None
        for column, edge, count in zip(columns, edges, bins, strict=True):
            within = op.And(op.GreaterOrEqual(column, _end(ctx, edge, 0)), op.LessOrEqual(column, _end(ctx, edge, -1)))
            own = places(ctx, op.Where(within, column, _end(ctx, edge, 0)), edge, count)
            place = own if place is None else op.Add(op.Mul(place, count), own)
            inside = within if inside is None else op.And(inside, within)
        place = op.Where(inside, place, every)
        amounts = op.Reshape(weight, [-1]) if weight is not None else op.Expand(ctx.constant(1, dtype), op.Shape(place))
        counts = op.ScatterElements(counts, place, amounts, axis=0, reduction="add")
    counts = ctx.reshape(op.Slice(counts, [0], [every]), bins)
    if not density:
        return counts
    counts = op.Div(counts, op.ReduceSum(counts, keepdims=0))
    for index, edge in enumerate(edges):
        widths = op.Sub(op.Slice(edge, [1], [bins[index] + 1]), op.Slice(edge, [0], [bins[index]]))
        counts = op.Div(counts, ctx.reshape(widths, [-1 if i == index else 1 for i in range(len(bins))]))
    return counts


def _searched_places(ctx: LoweringContext, x: ir.Value, edges: ir.Value, count: int) -> ir.Value:
    behind = places_among(ctx, edges, 1, count + 1, x, 1, True)
    return ctx.op.Min(ctx.op.Sub(behind, 1), count - 1)


def _even_places(ctx: LoweringContext, x: ir.Value, edges: ir.Value, count: int) -> ir.Value:
    """By a division, which may be one bin off beside an edge: as torch finds them, too."""
    op = ctx.op
    low, high = _end(ctx, edges, 0), _end(ctx, edges, -1)
    guess = op.Div(op.Mul(op.Sub(x, low), float(count)), op.Sub(high, low))
    guess = op.Clip(ctx.cast(guess, torch.int64), 0, count - 1)
    below = op.Less(x, op.Gather(edges, guess, axis=0))
    above = op.GreaterOrEqual(x, op.Gather(edges, op.Add(guess, 1), axis=0))
    shift = op.Sub(ctx.cast(above, torch.int64), ctx.cast(below, torch.int64))
    return op.Clip(op.Add(guess, shift), 0, count - 1)


def _end(ctx: LoweringContext, edges: ir.Value, place: int) -> ir.Value:
    return ctx.op.Gather(edges, ctx.constant(place, torch.int64), axis=0)
