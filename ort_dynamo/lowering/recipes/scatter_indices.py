"""Writes the indices of a scatter along one axis in the form that ONNX Runtime's kernel is fast at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.recipes.positions import from_start, positions_along, size_to_check
from ort_dynamo.lowering.recipes.sums.add_rows import row_places
from ort_dynamo.lowering.symbols import same_size

__all__ = ["ScatterIndices", "of_entries", "of_rows", "slice_numbers"]

_FAR = 1 << 40
"""Beyond any size, and small enough to be multiplied by one."""


@dataclass(frozen=True)
class ScatterIndices:
    """The entries of a tensor that a scatter writes, in the order of its source.

    Attributes:
        index: int64; the source's shape, or 1-D where the tensor is taken as flat.
        axis: the axis of the index; None for the flat tensor.
        shape: the tensor's shape, 1-D int64.
        rows: the indices of the rows, 1-D, if whole rows are written; else None.
    """

    index: ir.Value
    axis: int | None
    shape: ir.Value
    rows: ir.Value | None = None

    def write(self, op: OpBuilder, data: ir.Value, source: ir.Value, reduction: str = "none") -> ir.Value:
        """Reduce the entries of `source` into `data`. The kernel walks them in order."""
        if self.axis is not None:
            return op.ScatterElements(data, self.index, source, axis=self.axis, reduction=reduction)
        flat, values = op.Reshape(data, [-1]), op.Reshape(source, [-1])
        written = op.ScatterElements(flat, self.index, values, axis=0, reduction=reduction)
        return op.Reshape(written, self.shape, allowzero=1)


def of_rows(ctx: LoweringContext, sizes: Sequence[Size], rows: ir.Value) -> ScatterIndices:
    """Give whole rows of a tensor of shape `sizes`: `rows` is 1-D; negative indices are out of bounds."""
    op = ctx.op
    index = from_start(ctx, rows, size_to_check(ctx, sizes[0]))
    numbers = op.Max(op.Min(index, _FAR), -_FAR)
    return ScatterIndices(row_places(ctx, numbers, math.prod(sizes[1:])), None, ctx.shape(sizes), numbers)


def of_entries(
    ctx: LoweringContext, sizes: Sequence[Size], axis: int, index: ir.Value, counts: Sequence[Size]
) -> ScatterIndices:
    """Return the entries that `index`, of shape `counts`, names along `axis` of a tensor of shape `sizes`.

    A negative index is out of bounds.
    """
    index, shape = ctx.cast(index, torch.int64), ctx.shape(sizes)
    if axis == len(sizes) - 1 or not ctx.target.has_defect("slow_scatter_along_leading_axes"):
        return ScatterIndices(from_start(ctx, index, size_to_check(ctx, sizes[axis])), axis, shape)
    op = ctx.op
    place = op.Mul(index, ctx.scalar(math.prod(sizes[axis + 1 :]), torch.int64))
    for other, count in enumerate(counts):
        if other != axis:
            stride = ctx.scalar(math.prod(sizes[other + 1 :]), torch.int64)
            place = op.Add(place, op.Mul(positions_along(ctx, other, count, len(sizes)), stride))
    inside = op.Less(index, ctx.scalar(sizes[axis], torch.int64))
    if not ctx.target.stands_alone:
        inside = op.And(inside, op.GreaterOrEqual(index, 0))
    return ScatterIndices(op.Reshape(op.Where(inside, place, _FAR), [-1]), None, shape)


def slice_numbers(ctx: LoweringContext, sizes: Sequence[Size], axis: int, index: ir.Value) -> ir.Value | None:
    """Give the 1-D index along `axis` that `index` was expanded from, where it names whole slices of shape `sizes`."""
    fake = ctx.fake(index)
    others = [other for other in range(len(sizes)) if other != axis]
    if fake.dim() < 2 or not all(same_size(fake.shape[o], sizes[o]) and same_size(fake.stride(o), 0) for o in others):
        return None
    producer = index.producer()
    source = producer.inputs[0] if producer is not None and producer.op_type == "Expand" else None
    if source is not None and source.shape is not None and len(source.shape) >= len(sizes) - axis:
        wide = [place for place, size in enumerate(source.shape, start=len(sizes) - len(source.shape)) if size != 1]
        if wide == [axis]:
            return ctx.op.Reshape(source, [-1])
    one = ctx.op.Slice(index, ctx.ints([0] * len(others)), ctx.ints([1] * len(others)), ctx.ints(others))
    return ctx.op.Reshape(one, [-1])
