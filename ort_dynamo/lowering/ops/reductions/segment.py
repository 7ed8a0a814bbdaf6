"""Reductions of consecutive segments of a dimension."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number, Size, is_empty
from ort_dynamo.lowering.recipes.checks import any_of, stop_if
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.sums.running_sum import running_sum
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten

_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -math.inf, "min": math.inf}
_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "mul", "max": "max", "min": "min"}
"""torch's names -> ONNX's."""


class _Segments:
    """The segment of each entry of `data`, and reductions by segment.

    Entries before the first segment and after the last one go to an extra segment, which is cut off.

    Attributes:
        axis: the dimension of `data` that is cut into segments.
        counted: the lengths of the segments, int64, of shape data.shape[:axis] + (segments,).
        lengths: the same with shape data.shape[:axis] + (segments,), then ones up to data's rank.
    """

    def __init__(
        self, ctx: LoweringContext, data: ir.Value, lengths: ir.Value | None, offsets: ir.Value | None, axis: int
    ) -> None:
        op, self._ctx = ctx.op, ctx
        self.axis = axis % ctx.rank(data)
        self.sizes: list[Size] = list(ctx.sizes(data))
        outer, inner = self.sizes[: self.axis], len(self.sizes) - self.axis - 1
        given = offsets if offsets is not None else lengths
        if given is None:
            raise ctx.refuse("segments given by indices")
        if is_empty(ctx.sizes(given)):
            raise ctx.refuse("0 segments")
        marks = ctx.cast(given, torch.int64)
        last = ctx.constant(self.axis, torch.int64)
        count = ctx.sizes(given)[-1]
        if offsets is None:
            self.segments: Size = count
            counted, ends, first = marks, op.CumSum(marks, last), 0
        else:
            self.segments = count - 1
            after = op.Slice(marks, [1], ctx.shape([count]), [self.axis])
            before = op.Slice(marks, [0], ctx.shape([count - 1]), [self.axis])
            counted, ends, first = op.Sub(after, before), marks, 1
        self.counted = counted
        self.lengths = op.Unsqueeze(counted, list(range(-inner, 0))) if inner else counted
        # Count the segments that end at or before each entry.
        size = ctx.scalar(self.sizes[self.axis], torch.int64)
        ones = op.Expand(ctx.constant(1, torch.int64), op.Shape(ends))
        none = zeros(ctx, marks, [*outer, self.sizes[self.axis] + 1])
        passed = op.ScatterElements(none, op.Min(ends, size), ones, axis=self.axis, reduction="add")
        passed = op.CumSum(passed, last) if outer else running_sum(ctx, passed)
        passed = op.Slice(passed, [0], ctx.shape([self.sizes[self.axis]]), [self.axis])
        if first:
            passed = op.Sub(passed, 1)
            passed = op.Where(op.Less(passed, 0), ctx.scalar(self.segments, torch.int64), passed)
        else:
            passed = op.Min(passed, ctx.scalar(self.segments, torch.int64))
        if inner:
            passed = op.Unsqueeze(passed, list(range(-inner, 0)))
        self._places = op.Expand(passed, ctx.shape(self.sizes))

    def reduce(self, value: ir.Value, reduction: str, initial: ir.Value) -> ir.Value:
        """`value`, of data's shape, reduced with the 0-d `initial`; torch's name of a reduction."""
        ctx, op = self._ctx, self._ctx.op
        sizes = list(self.sizes)
        sizes[self.axis] = self.segments + 1
        start = op.Expand(initial, ctx.shape(sizes))
        found = op.ScatterElements(start, self._places, value, axis=self.axis, reduction=_REDUCTIONS[reduction])
        return op.Slice(found, [0], ctx.shape([self.segments]), [self.axis])

    def count(self, mask: ir.Value) -> ir.Value:
        """Count the entries of each segment that are set, int64."""
        ctx = self._ctx
        return self.reduce(ctx.cast(mask, torch.int64), "sum", ctx.constant(0, torch.int64))

    def spread(self, value: ir.Value) -> ir.Value:
        """For each entry the value of its segment; 0 for entries of none."""
        op, rank = self._ctx.op, len(self.sizes)
        more = op.Pad(value, self._ctx.ints([0] * rank + [int(a == self.axis) for a in range(rank)]))
        return op.GatherElements(more, self._places, axis=self.axis)


@lowering(aten.segment_reduce.default)
def segment_reduce(
    ctx: LoweringContext,
    data: ir.Value,
    reduce: str,
    *,
    lengths: ir.Value | None = None,
    indices: ir.Value | None = None,
    offsets: ir.Value | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Number | None = None,
) -> ir.Value:
    """segment_reduce(Tensor data, str reduce, *, Tensor? lengths=None, Tensor? indices=None, Tensor? offsets=None, int axis=0, bool unsafe=False, Scalar? initial=None) -> Tensor"""  # noqa: E501
    op = ctx.op
    _check(ctx, data)
    dtype = float_dtype(ctx.out.dtype)
    segments = _Segments(ctx, data, lengths, offsets, axis)
    x = _checked(ctx, segments, ctx.cast(data, dtype), sums=offsets is None and not unsafe)
    result = segments.reduce(x, reduce, ctx.scalar(_NEUTRAL[reduce] if initial is None else initial, dtype))
    if reduce in ("max", "min"):
        # Defect comparisons_lose_nan.
        result = op.Where(op.Greater(segments.count(op.IsNaN(x)), 0), math.nan, result)
    if reduce == "mean":
        # The mean of no elements is nan, or the initial value.
        length = ctx.cast(segments.lengths, dtype)
        result = op.Div(result, length if initial is None else op.Max(length, 1.0))
    return ctx.cast(result, ctx.out.dtype)


@lowering(aten._segment_reduce_backward.default)
def segment_reduce_backward(
    ctx: LoweringContext,
    grad: ir.Value,
    output: ir.Value,
    data: ir.Value,
    reduce: str,
    *,
    lengths: ir.Value | None = None,
    offsets: ir.Value | None = None,
    axis: int = 0,
    initial: Number | None = None,
) -> ir.Value:
    """_segment_reduce_backward(Tensor grad, Tensor output, Tensor data, str reduce, *, Tensor? lengths=None, Tensor? offsets=None, int axis=0, Scalar? initial=None) -> Tensor"""  # noqa: E501
    op = ctx.op
    _check(ctx, data)
    dtype = float_dtype(ctx.out.dtype)
    g, x, y = (ctx.cast(value, dtype) for value in (grad, data, output))
    segments = _Segments(ctx, data, lengths, offsets, axis)
    if reduce == "mean":
        g = op.Div(g, op.Max(ctx.cast(segments.lengths, dtype), 1.0))
    slope = segments.spread(g)
    if reduce in ("max", "min"):
        chosen = op.Or(op.Equal(x, segments.spread(y)), op.IsNaN(x))
        shares = ctx.cast(segments.spread(segments.count(chosen)), dtype)
        # torch divides only positive slopes among equal entries.
        slope = op.Where(op.Greater(slope, 0.0), op.Div(slope, op.Max(shares, 1.0)), slope)
        slope = op.Where(chosen, slope, 0.0)
    elif reduce == "prod":
        start = ctx.scalar(1.0 if initial is None else initial, dtype)
        slope = _product_slope(ctx, segments, slope, x, y, start)
    return ctx.cast(slope, ctx.out.dtype)


def _product_slope(
    ctx: LoweringContext, segments: _Segments, slope: ir.Value, x: ir.Value, y: ir.Value, start: ir.Value
) -> ir.Value:
    """Multiply `slope` by the product of the segment's other entries: y / x, but exact beside zero and nan."""
    op = ctx.op
    zero, unknown = op.Equal(x, 0.0), op.IsNaN(x)
    special = op.Or(zero, unknown)
    plain = op.Where(special, 1.0, x)
    rest = segments.spread(segments.reduce(plain, "prod", start))
    zeros_, unknowns = (
        op.Sub(segments.spread(segments.count(mask)), ctx.cast(mask, torch.int64)) for mask in (zero, unknown)
    )
    rest = op.Where(op.Greater(zeros_, 0), 0.0, rest)
    rest = op.Where(op.Greater(unknowns, 0), math.nan, rest)
    return op.Where(special, op.Mul(slope, rest), op.Div(op.Mul(slope, segments.spread(y)), plain))


def _checked(ctx: LoweringContext, segments: _Segments, value: ir.Value, *, sums: bool) -> ir.Value:
    """`value`; the session stops where a segment has a negative length or, with `sums`, their sum is another size."""
    op, counted, rank = ctx.op, segments.counted, len(segments.sizes)
    negative = any_of(ctx, op.Less(counted, 0))
    value = stop_if(ctx, negative, value, "segment_reduce(): lengths contains negative value!", rank)
    if not sums:
        return value
    size = ctx.scalar(segments.sizes[segments.axis], torch.int64)
    total = op.ReduceSum(counted, [segments.axis], keepdims=0)  # not [-1]: defect last_axis_of_nothing
    other = op.Not(op.Equal(total, size))
    words = f"segment_reduce(): Expected all rows of lengths to sum to data.size({segments.axis}) when !unsafe."
    return stop_if(ctx, any_of(ctx, other), value, words, rank)


def _check(ctx: LoweringContext, data: ir.Value) -> None:
    if is_empty(ctx.sizes(data)):
        raise ctx.refuse("segments of an empty tensor")
