"""as_strided: the elements of a tensor's memory under other sizes and strides.

A session sees elements, not memory. Where each element lies in memory is known from the fake tensor's own strides, so
that an offset in memory becomes an index among the elements, as long as the tensor holds the element there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from ort_dynamo.graph.boundary import in_order, inverse, physical_order
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.symbols import same_size, same_sizes
from ort_dynamo.torch_internals.kernels.operators import aten

Places = npt.NDArray[np.int64]


@lowering(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(
    ctx: LoweringContext,
    self: ir.Value,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> ir.Value:
    """as_strided(Tensor(a) self, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor(a)"""
    if _restates_all(ctx, self, size, stride, storage_offset):
        return ctx.reshape(self, size)
    flat = ctx.op.Reshape(self, [-1])
    places = _static_places(ctx, self, size, stride, storage_offset)
    if places is None:
        memory = ctx.op.Reshape(_in_memory_order(ctx, self), [-1])
        return ctx.op.Gather(memory, _symbolic_places(ctx, self, size, stride, storage_offset), axis=0)
    numbers = places.flatten()
    if _is_range(numbers):
        first = int(numbers[0]) if numbers.size else 0
        whole = numbers.size == ctx.fake(self).numel()
        part = flat if whole else ctx.op.Slice(flat, [first], [first + numbers.size], [0])
        return ctx.reshape(part, size)
    return ctx.reshape(ctx.op.Gather(flat, ctx.ints(numbers.tolist()), axis=0), size)


@lowering(aten.as_strided_scatter.default)
def as_strided_scatter(
    ctx: LoweringContext,
    self: ir.Value,
    src: ir.Value,
    size: Sequence[Size],
    stride: Sequence[Size],
    storage_offset: Size | None = None,
) -> ir.Value:
    """as_strided_scatter(Tensor self, Tensor src, SymInt[] size, SymInt[] stride, SymInt? storage_offset=None) -> Tensor"""  # noqa: E501
    source = ctx.cast(src, ctx.out.dtype)
    if not same_sizes(ctx.sizes(src), size):
        source = ctx.op.Expand(source, ctx.shape(size))
    if _restates_all(ctx, self, size, stride, storage_offset):
        return ctx.reshape(source, ctx.sizes(self))
    places = _static_places(ctx, self, size, stride, storage_offset)
    if places is None:
        where = ctx.op.Reshape(_symbolic_places(ctx, self, size, stride, storage_offset), [-1])
        return _written_in_memory(ctx, self, where, ctx.op.Reshape(source, [-1]))
    if not places.size:
        return self
    if len(np.unique(_own_places(ctx, self))) < math.prod(ctx.fake(self).shape):
        raise ctx.refuse("as_strided_scatter into a tensor whose elements overlap in memory")
    where = ctx.ints(places.flatten().tolist())
    flat, values = ctx.op.Reshape(self, [-1]), ctx.op.Reshape(source, [-1])
    return ctx.reshape(ctx.op.ScatterElements(flat, where, values, axis=0), ctx.sizes(self))


def _restates_all(
    ctx: LoweringContext, self: ir.Value, size: Sequence[Size], stride: Sequence[Size], offset: Size | None
) -> bool:
    """Check whether as_strided sees all elements of `self` in order, and so is a reshape."""
    fake = ctx.fake(self)
    return (
        same_size(fake.storage_offset(), fake.storage_offset() if offset is None else offset)
        and same_size(math.prod(fake.shape), math.prod(size))
        and in_order(fake.shape, fake.stride())
        and in_order(size, stride)
    )


def _grid(sizes: Sequence[int], strides: Sequence[int], offset: int) -> Places:
    """Return the offset in memory of each element."""
    places = np.full((), offset, np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        places = places[..., None] + np.arange(size) * stride
    return places


def _own_places(ctx: LoweringContext, self: ir.Value) -> Places:
    fake = ctx.fake(self)
    return _grid(list(fake.shape), list(fake.stride()), int(fake.storage_offset())).flatten()


def _static_places(
    ctx: LoweringContext, self: ir.Value, size: Sequence[Size], stride: Sequence[Size], offset: Size | None
) -> Places | None:
    """Give the flat index in `self` of each element of the view; None if a size is symbolic."""
    fake = ctx.fake(self)
    start = fake.storage_offset() if offset is None else offset
    every = [*fake.shape, *fake.stride(), fake.storage_offset(), *size, *stride, start]
    if any(isinstance(number, torch.SymInt) for number in every):
        return None
    wanted = _grid([int(n) for n in size], [int(n) for n in stride], int(start))
    own = _own_places(ctx, self)
    if not wanted.size:
        return wanted
    number = np.full(int(max(wanted.max(), own.max(initial=0))) + 1, -1)
    number[own] = np.arange(own.size)
    found = number[wanted]
    if (found < 0).any():
        raise ctx.refuse("as_strided reads memory outside of the tensor")
    return np.asarray(found, np.int64)


def _symbolic_places(
    ctx: LoweringContext, self: ir.Value, size: Sequence[Size], stride: Sequence[Size], offset: Size | None
) -> ir.Value:
    """Return the same among the elements of `self` in memory, computed while the session runs, where they fill it."""
    op = ctx.op
    fake = ctx.fake(self)
    fills = in_order(fake.shape, fake.stride()) or physical_order(fake)
    if not (same_size(fake.storage_offset(), 0) and fills):
        raise ctx.refuse("as_strided with symbolic sizes, of a tensor that does not fill its storage")
    places = ctx.scalar(0 if offset is None else offset, torch.int64)
    for count, step in zip(size, stride, strict=True):
        zero, one = ctx.constant(0, torch.int64), ctx.constant(1, torch.int64)
        along = op.Mul(op.Range(zero, ctx.scalar(count, torch.int64), one), ctx.scalar(step, torch.int64))
        places = op.Add(op.Unsqueeze(places, [-1]), along)
    return places


def _in_memory_order(ctx: LoweringContext, self: ir.Value) -> ir.Value:
    """`self` with its dimensions from slowest to fastest in memory."""
    order = physical_order(ctx.fake(self))
    return ctx.op.Transpose(self, perm=order) if order else self


def _written_in_memory(ctx: LoweringContext, self: ir.Value, where: ir.Value, values: ir.Value) -> ir.Value:
    """`self` with `values`, 1-D, at the offsets `where` in memory."""
    op, order = ctx.op, physical_order(ctx.fake(self))
    memory = _in_memory_order(ctx, self)
    written = op.ScatterElements(op.Reshape(memory, [-1]), where, values, axis=0)
    result = op.Reshape(written, op.Shape(memory), allowzero=1)
    return op.Transpose(result, perm=inverse(order)) if order else result


def _is_range(numbers: Places) -> bool:
    return bool((np.diff(numbers) == 1).all())
