"""Writing into a view (select_scatter, ...) and the gradients of views."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.ops.memory.views import axis, cut, from_front, size_is_zero
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.symbols import same_size
from ort_dynamo.torch_internals.kernels.operators import aten


def _clamped(start: Size | None, size: Size) -> Size:
    """Return the start of a slice, as slicing clamps it from below; above, ONNX clamps too."""
    place = from_front(0 if start is None else start, size)
    return max(place, 0) if isinstance(place, int) else torch.sym_max(place, 0)  # type: ignore[no-untyped-call]


def _replace_range(ctx: LoweringContext, self: ir.Value, src: ir.Value, a: int, start: Size, count: Size) -> ir.Value:
    """`src` in place of the entries start … start + count of dimension `a`."""
    size = ctx.sizes(self)[a]
    parts = []
    if not same_size(start, 0):
        parts.append(cut(ctx, self, a, 0, start))
    parts.append(src)
    if not same_size(start + count, size):
        parts.append(cut(ctx, self, a, start + count, sys.maxsize))
    return ctx.op.Concat(*parts, axis=a) if len(parts) > 1 else src


def _padded(ctx: LoweringContext, grad: ir.Value, rank: int, a: int, before: Size, after: Size) -> ir.Value:
    """`grad`, of rank `rank`, with zeros around it along dimension `a`."""
    if same_size(before, 0) and same_size(after, 0):
        return grad
    pads: list[Size] = [0] * (2 * rank)
    pads[a], pads[rank + a] = before, after
    return ctx.op.Pad(grad, ctx.shape(pads))


# -- select ------------------------------------------------------------------------------------------------------


@lowering(aten.select_scatter.default)
def select_scatter(ctx: LoweringContext, self: ir.Value, src: ir.Value, dim: int, index: Size) -> ir.Value:
    """select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor"""
    a = axis(dim, ctx.rank(self))
    start = from_front(index, ctx.sizes(self)[a])
    row = ctx.op.Unsqueeze(ctx.cast(src, ctx.out.dtype), [a])
    return _replace_range(ctx, self, row, a, start, 1)


@lowering(aten.select_backward.default)
def select_backward(
    ctx: LoweringContext, grad_output: ir.Value, input_sizes: Sequence[Size], dim: int, index: Size
) -> ir.Value:
    """select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor"""
    rank = len(input_sizes)
    a = axis(dim, rank)
    start = from_front(index, input_sizes[a])
    row = ctx.op.Unsqueeze(grad_output, [a])
    return _padded(ctx, row, rank, a, start, input_sizes[a] - start - 1)


# -- slice -------------------------------------------------------------------------------------------------------


@lowering(aten.slice_scatter.default)
def slice_scatter(
    ctx: LoweringContext,
    self: ir.Value,
    src: ir.Value,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: Size = 1,
) -> ir.Value:
    """slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"""  # noqa: E501
    a = axis(dim, ctx.rank(self))
    sizes = ctx.sizes(src)
    first = _clamped(start, ctx.sizes(self)[a])
    source = ctx.cast(src, ctx.out.dtype)
    if any(size_is_zero(size) for size in sizes):
        return self
    if same_size(step, 1):
        return _replace_range(ctx, self, source, a, first, sizes[a])
    return _written_apart(ctx, self, source, sizes, a, first, step)


def _written_apart(
    ctx: LoweringContext, self: ir.Value, src: ir.Value, sizes: Sequence[Size], a: int, first: Size, step: Size
) -> ir.Value:
    """`src`, of shape `sizes`, in place of the entries first, first + step, ... of dimension `a`."""
    op = ctx.op
    bounds = (ctx.scalar(number, torch.int64) for number in (first, first + sizes[a] * step, step))
    column = op.Reshape(op.Range(*bounds), ctx.ints([-1] + [1] * (len(sizes) - a - 1)))
    return op.ScatterElements(self, op.Expand(column, ctx.shape(sizes)), src, axis=a)


@lowering(aten.slice_backward.default)
def slice_backward(
    ctx: LoweringContext,
    grad_output: ir.Value,
    input_sizes: Sequence[Size],
    dim: int,
    start: Size,
    end: Size,
    step: Size,
) -> ir.Value:
    """slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end, SymInt step) -> Tensor"""  # noqa: E501
    rank = len(input_sizes)
    a = axis(dim, rank)
    sizes = list(ctx.sizes(grad_output))
    first = _clamped(start, input_sizes[a])
    if isinstance(sizes[a], int) and sizes[a] == 0:
        return ctx.op.Expand(ctx.constant(0, ctx.out.dtype), ctx.shape(input_sizes))
    grad, count = grad_output, sizes[a]
    if not isinstance(step, int):
        return _written_apart(ctx, zeros(ctx, grad, input_sizes), grad, sizes, a, first, step)
    if step > 1 and same_size(count * step, input_sizes[a]):
        return _interleaved(ctx, grad, sizes, a, step, first)
    if step > 1:
        grad = _interleaved(ctx, grad, sizes, a, step, 0)
        spread = count * step - (step - 1)
        count = spread if isinstance(spread, int) else torch.sym_max(spread, 0)  # type: ignore[no-untyped-call]
        grad = cut(ctx, grad, a, 0, count)
    return _padded(ctx, grad, rank, a, first, input_sizes[a] - first - count)


def _interleaved(
    ctx: LoweringContext, value: ir.Value, sizes: list[Size], a: int, stride: int, first: Size
) -> ir.Value:
    """Put each entry of dimension `a` of `value`, of shape `sizes`, among zeros, at place `first` of `stride`."""
    column = ctx.op.Unsqueeze(value, [a + 1])
    wide = _padded(ctx, column, len(sizes) + 1, a + 1, first, stride - 1 - first)
    return ctx.reshape(wide, [*sizes[:a], sizes[a] * stride, *sizes[a + 1 :]])


# -- diagonal ----------------------------------------------------------------------------------------------------


def _write_diagonal(
    ctx: LoweringContext, matrix: ir.Value, sizes: Sequence[Size], src: ir.Value, offset: int
) -> ir.Value:
    """`src` on the diagonal of the last two dimensions of `matrix`, which has the shape `sizes`."""
    op = ctx.op
    *lead, height, width = sizes
    first = offset if offset >= 0 else -offset * width
    count = ctx.scalar(ctx.sizes(src)[-1], torch.int64)
    numbers = op.Range(ctx.constant(0, torch.int64), count, ctx.constant(1, torch.int64))
    places = op.Add(op.Mul(numbers, ctx.scalar(width + 1, torch.int64)), ctx.scalar(first, torch.int64))
    where = op.Expand(places, ctx.shape(ctx.sizes(src)))
    flat = ctx.reshape(matrix, [*lead, height * width])
    written = op.ScatterElements(flat, where, ctx.cast(src, ctx.out.dtype), axis=len(lead))
    return ctx.reshape(written, sizes)


def _diagonal_order(rank: int, dim1: int, dim2: int) -> tuple[list[int], list[int]]:
    """Return the permutation that moves `dim1` and `dim2` to the end, and its inverse."""
    last = [axis(dim1, rank), axis(dim2, rank)]
    order = [d for d in range(rank) if d not in last] + last
    return order, sorted(range(rank), key=order.__getitem__)


@lowering(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: LoweringContext, self: ir.Value, src: ir.Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> ir.Value:
    """diagonal_scatter(Tensor self, Tensor src, int offset=0, int dim1=0, int dim2=1) -> Tensor"""
    sizes = ctx.sizes(self)
    order, back = _diagonal_order(len(sizes), dim1, dim2)
    matrix = ctx.op.Transpose(self, perm=order)
    written = _write_diagonal(ctx, matrix, [sizes[d] for d in order], src, offset)
    return ctx.op.Transpose(written, perm=back)


@lowering(aten.diagonal_backward.default)
def diagonal_backward(
    ctx: LoweringContext,
    grad_output: ir.Value,
    input_sizes: Sequence[Size],
    offset: int,
    dim1: int,
    dim2: int,
) -> ir.Value:
    """diagonal_backward(Tensor grad_output, SymInt[] input_sizes, int offset, int dim1, int dim2) -> Tensor"""
    order, back = _diagonal_order(len(input_sizes), dim1, dim2)
    sizes = [input_sizes[d] for d in order]
    written = _write_diagonal(ctx, zeros(ctx, grad_output, sizes), sizes, grad_output, offset)
    return ctx.op.Transpose(written, perm=back)
