"""Reading and writing at positions that index tensors name."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.ops.memory.views import axis, size_is_zero
from ort_dynamo.lowering.recipes.positions import entries_at, from_either_end, from_start, ordinals, size_to_check
from ort_dynamo.lowering.recipes.promotion import accumulator
from ort_dynamo.lowering.recipes.sums.add_rows import add_rows
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.symbols import same_size
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import known_true


@dataclass(frozen=True)
class _Selection:
    """Several index tensors merged into one, for a tensor whose indexed dimensions are merged into one.

    Attributes:
        data: the tensor with its indexed dimensions merged.
        axis: the merged dimension of `data`.
        merged: its size.
        before, after: the sizes of the dimensions of `data` before and after it.
        positions: indices along the merged dimension, int64 of shape `sizes`; negative ones count from its end.
        sizes: the broadcast shape of the index tensors; None if it depends on a mask's data.
        order: the permutation from the indexed tensor to `data`; None without a transposition.
    """

    data: ir.Value
    axis: int
    merged: Size
    before: list[Size]
    after: list[Size]
    positions: ir.Value
    sizes: list[Size] | None
    order: list[int] | None


def _select(ctx: LoweringContext, self: ir.Value, indices: Sequence[ir.Value | None], checked: bool) -> _Selection:
    sizes = ctx.sizes(self)
    masked = any(index is not None and _is_mask(ctx, index) for index in indices)
    limits = sizes if checked else ()
    given = {dim: index for dim, index in enumerate(_numbers(ctx, indices, limits)) if index is not None}
    dims = list(given)
    block = [sizes[dim] for dim in dims]
    merged = math.prod(block)
    positions = _positions(ctx, list(given.values()), block, checked)
    broadcast = None if masked else _broadcast([ctx.sizes(index) for index in given.values()])
    first, last = dims[0], dims[-1]
    if dims == list(range(first, last + 1)):
        before, after = list(sizes[:first]), list(sizes[last + 1 :])
        data = self if len(dims) == 1 else ctx.reshape(self, [*before, merged, *after])
        return _Selection(data, first, merged, before, after, positions, broadcast, None)
    # Index tensors with a gap between them: their dimensions come first in the result.
    others = [dim for dim in range(len(sizes)) if dim not in given]
    after = [sizes[dim] for dim in others]
    data = ctx.reshape(ctx.op.Transpose(self, perm=dims + others), [merged, *after])
    return _Selection(data, 0, merged, [], after, positions, broadcast, dims + others)


def _is_mask(ctx: LoweringContext, index: ir.Value) -> bool:
    return ctx.dtype(index) in (torch.bool, torch.uint8)


def _numbers(ctx: LoweringContext, indices: Sequence[ir.Value | None], limits: Sequence[Size]) -> list[ir.Value | None]:
    """Replace each mask in `indices` by the positions of its set entries, one tensor a dimension.

    With the sizes of the dimensions in `limits`, other indices are checked where a kernel can.
    """
    result: list[ir.Value | None] = []
    for index in indices:
        if index is None:
            result.append(None)
        elif not _is_mask(ctx, index):
            size = size_to_check(ctx, limits[len(result)]) if limits else None
            result.append(ctx.stand_in(from_either_end(ctx, index, size), index))
        elif ctx.rank(index) == 0:
            raise ctx.refuse("indexing by a mask without dimensions")
        else:
            found = ctx.op.NonZero(ctx.cast(index, torch.bool))
            result.extend(ctx.op.Gather(found, i, axis=0) for i in range(ctx.rank(index)))
    return result


def _positions(ctx: LoweringContext, indices: Sequence[ir.Value], sizes: Sequence[Size], checked: bool) -> ir.Value:
    """Row-major positions in a block of shape `sizes`."""
    op = ctx.op
    # A negative first index needs no wrapping: the sum stays negative, and ONNX counts it from the end.
    positions = ctx.cast(indices[0], torch.int64)
    total = sizes[0]
    if checked and len(indices) > 1:  # one far outside would come back inside by the multiplication, which wraps
        bounds = (ctx.scalar(bound, torch.int64) for bound in (-total - 1, total))
        positions = op.Clip(positions, *bounds)
    for value, size_ in zip(indices[1:], sizes[1:], strict=True):
        size = ctx.scalar(size_, torch.int64)
        index = ctx.cast(value, torch.int64)
        index = op.Where(op.Less(index, 0), op.Add(index, size), index)
        merged = op.Add(op.Mul(positions, size), index)
        total = total * size_
        if checked:
            # An index out of its own range could still land inside the block; one past its end fails as in eager.
            valid = op.And(op.GreaterOrEqual(index, 0), op.Less(index, size))
            merged = op.Where(valid, merged, ctx.scalar(total, torch.int64))
        positions = merged
    return positions


def _broadcast(shapes: Sequence[Sequence[Size]]) -> list[Size]:
    """Return the shape that `shapes` broadcast to, by statically known sizes; installs no guard."""
    result: list[Size] = [1] * max(map(len, shapes))
    for shape in shapes:
        for place, size in enumerate(shape, start=len(result) - len(shape)):
            if same_size(result[place], 1):
                result[place] = size
    return result


@lowering(aten.index.Tensor)
def index(ctx: LoweringContext, self: ir.Value, indices: Sequence[ir.Value | None]) -> ir.Value:
    """index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    if any(index is not None and _is_mask(ctx, index) for index in indices):
        raise ctx.refuse("indexing by a mask: the size of the result depends on the data")
    return _read(ctx, _select(ctx, self, indices, checked=True))


@lowering(aten._unsafe_index.Tensor)
def unsafe_index(ctx: LoweringContext, self: ir.Value, indices: Sequence[ir.Value | None]) -> ir.Value:
    """_unsafe_index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"""
    return _read(ctx, _select(ctx, self, indices, checked=False))


def _read(ctx: LoweringContext, selection: _Selection) -> ir.Value:
    if selection.sizes is None or selection.after or any(map(size_is_zero, (*selection.sizes, *selection.before))):
        return ctx.op.Gather(selection.data, selection.positions, axis=selection.axis)
    return entries_at(ctx, selection.data, selection.before, selection.positions, selection.sizes)


@lowering(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: LoweringContext,
    self: ir.Value,
    indices: Sequence[ir.Value | None],
    values: ir.Value,
    accumulate: bool = False,
) -> ir.Value:
    """index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor"""
    given = [index for index in indices if index is not None]
    if len(given) == 1 and _is_mask(ctx, given[0]):
        return _masked_put(ctx, self, indices, values, accumulate)
    checked = ctx.node.target == aten.index_put.default
    selection = _select(ctx, self, indices, checked)
    # Rows that come twice are summed in float32; ScatterND(reduction="add") would race on them.
    dtype = accumulator(ctx.out.dtype) if accumulate else ctx.out.dtype
    data, source = ctx.cast(selection.data, dtype), ctx.cast(values, dtype)
    result = _write(ctx, selection, data, source, accumulate)
    return _restore(ctx, self, selection, ctx.cast(result, ctx.out.dtype))


def _write(ctx: LoweringContext, selection: _Selection, data: ir.Value, values: ir.Value, accumulate: bool) -> ir.Value:
    op = ctx.op
    before, after, positions = selection.before, selection.after, selection.positions
    if selection.sizes is None:
        lead, trail = ctx.shape(before), ctx.shape(after)
        full = op.Concat(lead, op.Shape(positions), trail, axis=0)
        flat = op.Concat(lead, op.Reshape(op.Size(positions), [1]), trail, axis=0)
    else:
        full = ctx.shape([*before, *selection.sizes, *after])
        flat = ctx.shape([*before, math.prod(selection.sizes), *after])
    source = op.Expand(values, full)
    if selection.axis == 0 and not accumulate:
        return op.ScatterND(data, op.Unsqueeze(positions, [-1]), source)
    if selection.axis == 0:
        return ctx.reshape(add_rows(ctx, data, positions, source, math.prod(after)), [selection.merged, *after])
    where = op.Expand(op.Reshape(positions, [-1] + [1] * len(after)), flat)
    reduction = {"reduction": "add"} if accumulate else {}
    return op.ScatterElements(data, where, op.Reshape(source, flat, allowzero=1), axis=selection.axis, **reduction)


def _restore(ctx: LoweringContext, self: ir.Value, selection: _Selection, data: ir.Value) -> ir.Value:
    """Give `data` the shape and order of dimensions of `self`."""
    sizes = ctx.sizes(self)
    if selection.order is None:
        return data if len(selection.before + selection.after) + 1 == len(sizes) else ctx.reshape(data, sizes)
    back = sorted(range(len(sizes)), key=selection.order.__getitem__)
    return ctx.op.Transpose(ctx.reshape(data, [sizes[dim] for dim in selection.order]), perm=back)


def _masked_put(
    ctx: LoweringContext,
    self: ir.Value,
    indices: Sequence[ir.Value | None],
    values: ir.Value,
    accumulate: bool,
) -> ir.Value:
    """index_put with one mask."""
    op = ctx.op
    (dim,) = (d for d, index in enumerate(indices) if index is not None)
    mask = indices[dim]
    assert mask is not None
    covered = ctx.rank(mask)
    after = ctx.rank(self) - dim - covered
    condition = ctx.reshape(ctx.cast(mask, torch.bool), [*ctx.sizes(mask), *[1] * after])
    sizes = list(ctx.sizes(values))
    values = ctx.cast(values, ctx.out.dtype)
    place = len(sizes) - after - 1
    if place >= 0 and not same_size(sizes[place], 1):
        if same_size(sizes[place], 0):
            return self
        # A value for each selected position, in order. Positions that are not selected read any.
        flat = op.Reshape(ctx.cast(mask, torch.bool), [-1])
        count = op.ReduceSum(ctx.cast(flat, torch.int64), keepdims=0)
        # Where they are not as many as the values, this reads outside of them: eager raises too.
        size, numbers = ctx.scalar(sizes[place], torch.int64), ordinals(ctx, flat)
        fits = op.Equal(count, size)
        if not known_true(sizes[place] != 1):  # a size that depends on data: one value is for all positions
            single = op.Equal(size, 1)
            fits, numbers = op.Or(fits, single), op.Where(single, 0, numbers)
        other = op.Where(fits, 0, sys.maxsize)
        if not isinstance(sizes[place], int):  # perhaps there is none: then "any" is one more
            values = op.Concat(values, zeros(ctx, values, [*sizes[:place], 1, *sizes[place + 1 :]]), axis=place)
        places = from_either_end(ctx, op.Where(flat, numbers, other), sizes[place])
        values = op.Gather(values, places, axis=place)
        values = ctx.reshape(values, [*sizes[:place], *ctx.sizes(mask), *sizes[place + 1 :]])
    elif place >= 0:
        values = ctx.reshape(values, [*sizes[:place], *[1] * covered, *sizes[place + 1 :]])
    if not accumulate:
        return op.Where(condition, values, self)
    if ctx.out.dtype == torch.bool:
        return op.Or(self, op.And(condition, values))
    return op.Add(self, op.Where(condition, values, ctx.constant(0, ctx.out.dtype)))


@lowering(aten.index_select.default)
def index_select(ctx: LoweringContext, self: ir.Value, dim: int, index: ir.Value) -> ir.Value:
    """index_select(Tensor self, int dim, Tensor index) -> Tensor"""
    if ctx.rank(self) == 0:
        return ctx.reshape(ctx.op.Gather(ctx.reshape(self, [1]), from_start(ctx, index, 1), axis=0), [])
    place = axis(dim, ctx.rank(self))
    flat = index if ctx.rank(index) == 1 else ctx.reshape(index, [1])
    where = from_start(ctx, flat, ctx.sizes(self)[place])
    if place < ctx.rank(self) - 1 or any(map(size_is_zero, ctx.out.shape)):
        return ctx.op.Gather(self, where, axis=place)
    *before, count = ctx.out.shape
    return entries_at(ctx, self, before, where, [count])


@lowering(aten.take.default)
def take(ctx: LoweringContext, self: ir.Value, index: ir.Value) -> ir.Value:
    """take(Tensor self, Tensor index) -> Tensor"""
    flat, sizes = ctx.op.Reshape(self, [-1]), ctx.sizes(index)
    index = from_either_end(ctx, index, math.prod(ctx.sizes(self)))
    if any(map(size_is_zero, sizes)):
        return ctx.op.Gather(flat, index, axis=0)
    return entries_at(ctx, flat, [], index, sizes)


@lowering(aten.put.default)
def put(ctx: LoweringContext, self: ir.Value, index: ir.Value, source: ir.Value, accumulate: bool = False) -> ir.Value:
    """put(Tensor self, Tensor index, Tensor source, bool accumulate=False) -> Tensor"""
    op = ctx.op
    dtype = accumulator(ctx.out.dtype) if accumulate else ctx.out.dtype
    index = from_either_end(ctx, index, size_to_check(ctx, math.prod(ctx.sizes(self))))
    parts = (op.Reshape(value, [-1]) for value in (ctx.cast(self, dtype), index, ctx.cast(source, dtype)))
    result = op.ScatterElements(*parts, axis=0, **({"reduction": "add"} if accumulate else {}))
    return ctx.reshape(ctx.cast(result, ctx.out.dtype), ctx.sizes(self))
