"""Writes indices along a dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.graph.marks import STOPS
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.recipes.sums.running_sum import running_sum
from ort_dynamo.torch_internals.sizes.symbols import is_unbacked

__all__ = ["entries_at", "from_either_end", "from_start", "ordinals", "positions_along", "size_to_check"]


def positions_along(ctx: LoweringContext, axis: int, size: Size, rank: int) -> ir.Value:
    """Count 0, 1, … size - 1 along `axis` of `rank` dimensions, the others of size 1: int64."""
    zero, one = ctx.constant(0, torch.int64), ctx.constant(1, torch.int64)
    places = ctx.op.Range(zero, ctx.scalar(size, torch.int64), one)
    return ctx.op.Reshape(places, [-1 if i == axis else 1 for i in range(rank)])


def ordinals(ctx: LoweringContext, mask: ir.Value) -> ir.Value:
    """Count, for each element of a flat mask, how many are set before it: int64."""
    ones = ctx.cast(mask, torch.int64)
    return ctx.op.Sub(running_sum(ctx, ones), ones)


def from_start(ctx: LoweringContext, index: ir.Value, size: Size | None = None) -> ir.Value:
    """Make negative indices out of bounds: torch's operator rejects them, but ONNX's counts them from the end.

    It clears the bit below the sign bit. A negative index is then below -size for any size, the minimum of its dtype
    included: no tensor has a size with that bit in int64. CUDA has no BitwiseAnd. There a negative index becomes the
    maximum of int32, since kernels read the lower 32 bits of an int64, which would be -1 again. In a file negative
    indices count from the end.

    A fused kernel stops at an index that is negative, or not below `size`, as torch's kernel does.

    Args:
        ctx: the node's.
        index: int32 or int64, of any shape.
        size: the size of the indexed axis, if torch's CUDA kernel stops at an index out of bounds.
    """
    if ctx.target.stands_alone:
        return index
    index = ctx.cast(index, torch.int64)
    if not ctx.target.takes("BitwiseAnd", "", {"T": ir.DataType.INT64}):
        if ctx.target.fuses_kernels and size is not None:
            return _stopped(ctx, index, 0, size)
        return ctx.op.Where(ctx.op.Less(index, 0), _GREATEST_INT32, index)
    return ctx.op.BitwiseAnd(index, ~(1 << 62))


def from_either_end(ctx: LoweringContext, index: ir.Value, size: Size | None) -> ir.Value:
    """Give indices of which negative ones count from the end, as int64.

    A fused kernel stops at an index below -size or not below `size`, as torch's kernel does. On a CPU, ONNX Runtime's
    kernels stop there.

    Args:
        ctx: the node's.
        index: int32 or int64, of any shape.
        size: the size of the indexed axis, if torch's CUDA kernel stops at an index out of bounds.
    """
    number = ctx.cast(index, torch.int64)
    if ctx.target.fuses_kernels and size is not None and not ctx.target.stands_alone:
        return _stopped(ctx, number, -size, size)
    return number


def size_to_check(ctx: LoweringContext, size: Size) -> Size | None:
    """Return the size of the axis that an operator writes to; None in a backward.

    There it is the gradient of a read, which has checked the same indices.
    """
    return None if ctx.computes_gradient else size


_GREATEST_INT32 = (1 << 31) - 1


def _stopped(ctx: LoweringContext, index: ir.Value, least: Size, size: Size) -> ir.Value:
    """Return the int64 index; if out of range, a fused kernel stops, and a plain session gets a larger one."""
    op = ctx.op
    first, limit = (ctx.scalar(number, torch.int64) for number in (least, size))
    wrong = op.Or(op.Less(index, first), op.GreaterOrEqual(index, limit))
    found: ir.Value = op.Where(wrong, _GREATEST_INT32, index)
    node = found.producer()
    assert node is not None
    node.metadata_props[STOPS] = "1"
    return found


def entries_at(
    ctx: LoweringContext, value: ir.Value, before: Sequence[Size], places: ir.Value, sizes: Sequence[Size]
) -> ir.Value:
    """Take the elements of a value (*before, n) at the indices `places` along its last dimension, (*before, *sizes).

    The result equals Gather's. Gather's CPU kernel copies each element like a row, in 2.5 ns. GatherElements takes half
    a nanosecond, and as much again for expanding the indices to each row.

    Args:
        ctx: the node's.
        value: any dtype.
        before: its leading sizes; empty for a flat value.
        places: int64 of shape `sizes`; negative ones count from the end.
        sizes: the shape of `places`.
    """
    op = ctx.op
    if not ctx.target.facts.walks_entries or is_unbacked(*before, *sizes):
        return op.Gather(value, places, axis=len(before))  # which needs no sizes: no input may carry them
    count = math.prod(sizes)
    flat = places if len(sizes) == 1 else op.Reshape(places, [-1])
    if before:
        flat = op.Expand(flat, ctx.shape([*before, count]))
    found = op.GatherElements(value, flat, axis=len(before))
    return found if len(sizes) == 1 else ctx.reshape(found, [*before, *sizes])
