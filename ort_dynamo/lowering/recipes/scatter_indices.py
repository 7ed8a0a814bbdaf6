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

__all__ = ["ScatterIndices", "flat_places", "of_entries", "of_rows", "own_dimensions", "slice_numbers", "undo_expand"]

_FAR = (1 << 40) + (1 << 31) - 1
"""Beyond any size, and small enough to be multiplied by one; so are its lower 32 bits, which CUDA's kernels read."""


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
    return ScatterIndices(ctx.op.Reshape(flat_places(ctx, sizes, axis, index, counts), [-1]), None, shape)


def flat_places(
    ctx: LoweringContext, sizes: Sequence[Size], axis: int, index: ir.Value, counts: Sequence[Size]
) -> ir.Value:
    """Return the same entries as places of the flat tensor: int64 of shape `counts`.

    An index out of bounds is out of bounds of the flat tensor.
    """
    op = ctx.op
    place = op.Mul(index, ctx.scalar(math.prod(sizes[axis + 1 :]), torch.int64))
    for other, count in enumerate(counts):
        if other != axis:
            stride = ctx.scalar(math.prod(sizes[other + 1 :]), torch.int64)
            place = op.Add(place, op.Mul(positions_along(ctx, other, count, len(sizes)), stride))
    inside = op.Less(index, ctx.scalar(sizes[axis], torch.int64))
    if not ctx.target.stands_alone:
        inside = op.And(inside, op.GreaterOrEqual(index, 0))
    return op.Where(inside, place, _FAR)


def slice_numbers(ctx: LoweringContext, sizes: Sequence[Size], axis: int, index: ir.Value) -> ir.Value | None:
    """Give the 1-D index along `axis` that `index` was expanded from, where it names whole slices of shape `sizes`."""
    is_alone = (axis, axis + 1) == own_dimensions(ctx, sizes, axis, index)
    return undo_expand(ctx, index, axis, axis + 1) if is_alone and len(sizes) > 1 else None


def own_dimensions(ctx: LoweringContext, sizes: Sequence[Size], axis: int, index: ir.Value) -> tuple[int, int]:
    """Find the dimensions between those that an index repeats along, at both ends, as long as the indexed tensor.

    Args:
        ctx: the node's.
        sizes: the sizes of the tensor that is indexed.
        axis: the indexed dimension, which is between them.
        index: of the tensor's rank, unless one of both is 0-d.

    Returns:
        The first dimension, and the end of the others.
    """
    if ctx.rank(index) != len(sizes):
        return 0, len(sizes)
    counts, shared = ctx.sizes(index), _shared(ctx, index)
    whole = [same_size(counts[place], size) and place in shared for place, size in enumerate(sizes)]
    first = next((place for place in range(axis) if not whole[place]), axis)
    last = next((place for place in range(len(sizes) - 1, axis, -1) if not whole[place]), axis)
    return first, last + 1


def undo_expand(ctx: LoweringContext, index: ir.Value, first: int, end: int) -> ir.Value:
    """Return an index of int32 or int64 over its dimensions from `first` to `end`; along the others it repeats."""
    counts, rank = ctx.sizes(index), ctx.rank(index)
    cut = [*range(first), *range(end, rank)]
    source, ones = _expanded(index, rank)
    if source is None or not ones.issuperset(cut):
        narrow = ctx.op.Slice(index, ctx.ints([0] * len(cut)), ctx.ints([1] * len(cut)), ctx.ints(cut))
        return ctx.reshape(narrow, counts[first:end])
    missing = rank - len(source.shape or ())
    if gone := [place - missing for place in cut if place >= missing]:
        source = ctx.op.Squeeze(source, gone)
    return source if ones.issubset(cut) else ctx.op.Expand(source, ctx.shape(counts[first:end]))


def _shared(ctx: LoweringContext, index: ir.Value) -> set[int]:
    """Return the dimensions along which an index repeats one entry.

    A node that is lowered alone has no producer of its index: where sizes vary, strides alone tell.
    """
    fake = ctx.fake(index)
    shared = {place for place in range(fake.dim()) if same_size(fake.stride(place), 0)}
    if all(isinstance(size, int) for size in fake.shape):
        shared |= _expanded(index, fake.dim())[1]
    return shared


def _expanded(index: ir.Value, rank: int) -> tuple[ir.Value | None, set[int]]:
    """Return the value of which Expand made an index, and the dimensions of size 1 or none there; else None."""
    producer = index.producer()
    source = producer.inputs[0] if producer is not None and producer.op_type == "Expand" else None
    if source is None or source.shape is None:
        return None, set()
    missing = rank - len(source.shape)
    return source, {place for place in range(rank) if place < missing or source.shape[place - missing] == 1}
