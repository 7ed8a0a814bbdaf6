"""Padding and its gradient."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number, Size
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import known_true


def _pads(ctx: LoweringContext, rank: int, padding: Sequence[Size]) -> ir.Value:
    """torch's (last dimension first, begin and end side by side) as ONNX's (all begins, then all ends)."""
    missing = rank - len(padding) // 2
    begins = [0] * missing + [padding[i] for i in range(len(padding) - 2, -1, -2)]
    ends = [0] * missing + [padding[i + 1] for i in range(len(padding) - 2, -1, -2)]
    return ctx.shape([*begins, *ends])


@lowering(aten.constant_pad_nd.default)
def constant_pad_nd(ctx: LoweringContext, self: ir.Value, pad: Sequence[Size], value: Number = 0) -> ir.Value:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    sizes, left, kept = ctx.sizes(self), list(pad), self
    if all(isinstance(width, int) and width == 0 for width in pad):
        return self
    for i in range(len(pad) // 2):
        axis = len(sizes) - 1 - i
        before, after = (min(width, 0) if isinstance(width, int) else 0 for width in pad[2 * i : 2 * i + 2])
        if (before or after) and not known_true(sizes[axis] > -before - after):
            # A whole axis may be cut off: defect pad_of_no_axis.
            kept = ctx.op.Slice(kept, [-before], [after or sys.maxsize], [axis])
            left[2 * i], left[2 * i + 1] = left[2 * i] - before, left[2 * i + 1] - after
    return ctx.op.Pad(kept, _pads(ctx, len(sizes), left), ctx.element(value, ctx.out.dtype))


@lowering(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def reflection_pad(ctx: LoweringContext, self: ir.Value, padding: Sequence[Size]) -> ir.Value:
    """reflection_pad2d(Tensor self, SymInt[4] padding) -> Tensor"""
    return ctx.op.Pad(self, _pads(ctx, ctx.rank(self), padding), mode="reflect")


@lowering(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default)
def replication_pad(ctx: LoweringContext, self: ir.Value, padding: Sequence[Size]) -> ir.Value:
    """replication_pad2d(Tensor self, SymInt[4] padding) -> Tensor"""
    sizes, left = ctx.sizes(self), list(padding)
    value = self
    for i in range(len(left) // 2):
        axis = len(sizes) - 1 - i
        before, after, size = left[2 * i], left[2 * i + 1], sizes[axis]
        if not isinstance(before, int) or not isinstance(after, int) or min(before, after) < 0:
            # A whole axis may be cut off: defect pad_of_no_axis.
            value = ctx.op.Gather(value, _edge_places(ctx, before, after, size), axis=axis)
            left[2 * i] = left[2 * i + 1] = 0
    return ctx.op.Pad(value, _pads(ctx, len(sizes), left), mode="edge")


def _edge_places(ctx: LoweringContext, before: Size, after: Size, size: Size) -> ir.Value:
    """Along an axis of `size` elements: which one each element of the padded axis repeats."""
    if isinstance(size, int) and isinstance(before, int) and isinstance(after, int):
        return ctx.ints([min(max(place, 0), size - 1) for place in range(-before, size + after)])
    first, end, one = (ctx.scalar(number, torch.int64) for number in (-before, size + after, 1))
    places = ctx.op.Max(ctx.op.Range(first, end, one), ctx.constant(0, torch.int64))
    return ctx.op.Min(places, ctx.scalar(size - 1, torch.int64))


@lowering(
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
def replication_pad_backward(
    ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, padding: Sequence[Size]
) -> ir.Value:
    """replication_pad2d_backward(Tensor grad_output, Tensor self, SymInt[4] padding) -> Tensor"""
    sizes = ctx.sizes(self)
    value, current = grad_output, list(ctx.sizes(grad_output))
    for i in range(len(padding) // 2):
        axis = len(sizes) - 1 - i
        before, after, size = padding[2 * i], padding[2 * i + 1], sizes[axis]
        current[axis] = size
        if isinstance(before, int) and isinstance(after, int) and (isinstance(size, int) or min(before, after) >= 0):
            value = _fold_edges(ctx, value, axis, before, after, size)
        else:
            value = _add_to_sources(ctx, value, axis, _edge_places(ctx, before, after, size), current)
    return value


def _add_to_sources(
    ctx: LoweringContext, grad: ir.Value, axis: int, sources: ir.Value, shape: Sequence[Size]
) -> ir.Value:
    """Add each entry along `axis` to the element that it was copied from, for symbolic widths of the padding.

    Args:
        sources: the index of that element, 1-D int64.
        shape: the shape of the result.
    """
    op = ctx.op
    values = ctx.cast(grad, float_dtype(ctx.out.dtype))
    column = op.Reshape(sources, [-1] + [1] * (len(shape) - axis - 1))
    places = op.Expand(column, op.Shape(values))
    total = op.ScatterElements(zeros(ctx, values, shape), places, values, axis=axis, reduction="add")
    return ctx.cast(total, ctx.out.dtype)


def _fold_edges(ctx: LoweringContext, grad: ir.Value, axis: int, before: int, after: int, size: Size) -> ir.Value:
    """Add the gradients of copies of the first and the last element of `axis` to these elements."""
    op = ctx.op
    if isinstance(size, int) and size <= max(-before, -after, 1):
        # All is a copy of one element: the only one, or the last that was not cut off.
        total = op.ReduceSum(grad, [axis], keepdims=1)
        if size == 1:
            return total
        zero = ctx.constant(0, ctx.out.dtype)
        return op.Pad(total, [size - 1, 0] if before < 0 else [0, size - 1], zero, [axis])
    first, last = (before + 1 if before > 0 else 0), (-after - 1 if after > 0 else sys.maxsize)
    parts = [op.Slice(grad, [first], [last], [axis])]
    if before > 0:
        parts.insert(0, op.ReduceSum(op.Slice(grad, [0], [first], [axis]), [axis], keepdims=1))
    if after > 0:
        parts.append(op.ReduceSum(op.Slice(grad, [last], [sys.maxsize], [axis]), [axis], keepdims=1))
    whole = op.Concat(*parts, axis=axis) if len(parts) > 1 else parts[0]
    if before >= 0 and after >= 0:
        return whole
    # A negative width cut elements off: nothing flows back to them.
    cut = [max(-before, 0), max(-after, 0)]
    return op.Pad(whole, cut, ctx.constant(0, ctx.out.dtype), [axis])


@lowering(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
)
def reflection_pad_backward(
    ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, padding: Sequence[Size]
) -> ir.Value:
    """reflection_pad2d_backward(Tensor grad_output, Tensor self, SymInt[4] padding) -> Tensor"""
    sizes, shape = ctx.sizes(self), list(ctx.sizes(grad_output))
    value = grad_output
    for i in range(len(padding) // 2):
        axis = len(sizes) - 1 - i
        before, after, shape[axis] = padding[2 * i], padding[2 * i + 1], sizes[axis]
        if isinstance(before, int) and isinstance(after, int):
            value = _fold_reflections(ctx, value, axis, before, after, sizes[axis])
        else:
            value = _add_to_sources(ctx, value, axis, _reflected_places(ctx, before, after, shape[axis]), shape)
    return value


def _reflected_places(ctx: LoweringContext, before: Size, after: Size, size: Size) -> ir.Value:
    """Along an axis of `size` elements: which one each element of the padded axis reflects."""
    op = ctx.op
    last = ctx.scalar(size - 1, torch.int64)
    places = op.Range(*(ctx.scalar(number, torch.int64) for number in (-before, size + after, 1)))
    return op.Sub(last, op.Abs(op.Sub(last, op.Abs(places))))


def _fold_reflections(ctx: LoweringContext, grad: ir.Value, axis: int, before: int, after: int, size: Size) -> ir.Value:
    """Add the gradients of reflected entries of `axis` to their sources.

    The sources of the padding before are the entries after the first; those of the padding after precede the last.
    """
    op = ctx.op

    def turned(first: int, last: int) -> ir.Value:
        """Return the entries from `first` down to the one after `last`; negative indices count from the end."""
        return op.Slice(grad, [first], [last], [axis], [-1])

    def padded(value: ir.Value, front: Size, back: Size) -> ir.Value:
        return op.Pad(value, ctx.shape([front, back]), ctx.constant(0, ctx.out.dtype), [axis])

    middle = op.Slice(grad, [max(before, 0)], [-after if after > 0 else sys.maxsize], [axis])
    # A negative width cut elements off: nothing flows back to them.
    total = padded(middle, max(-before, 0), max(-after, 0)) if min(before, after) < 0 else middle
    if before > 0:
        total = op.Add(total, padded(turned(before - 1, -sys.maxsize - 1), 1, size - 1 - before))
    if after > 0:
        total = op.Add(total, padded(turned(-1, -after - 1), size - 1 - after, 1))
    return total
