"""Choosing between tensors by a mask; operators whose result size depends on one are refused here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number, Size, is_empty
from ort_dynamo.lowering.recipes.checks import any_of, has_elements, stop_if
from ort_dynamo.lowering.recipes.positions import from_either_end, ordinals
from ort_dynamo.lowering.recipes.sums.running_sum import running_sum
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import keep_in_eager, lowering
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import is_unbacked


@lowering(aten.where.self)
def where(ctx: LoweringContext, condition: ir.Value, self: ir.Value, other: ir.Value) -> ir.Value:
    """where.self(Tensor condition, Tensor self, Tensor other) -> Tensor"""
    dtype = ctx.out.dtype
    return ctx.op.Where(ctx.cast(condition, torch.bool), ctx.cast(self, dtype), ctx.cast(other, dtype))


@lowering(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(ctx: LoweringContext, self: ir.Value, mask: ir.Value, value: ir.Value | Number) -> ir.Value:
    """masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor"""
    dtype = ctx.out.dtype
    filler = ctx.cast(value, dtype) if isinstance(value, ir.Value) else ctx.element(value, dtype)
    return ctx.op.Where(ctx.cast(mask, torch.bool), filler, self)


@lowering(aten.tril.default)
def tril(ctx: LoweringContext, self: ir.Value, diagonal: Size = 0) -> ir.Value:
    """tril(Tensor self, SymInt diagonal=0) -> Tensor"""
    return ctx.op.Trilu(self, ctx.scalar(diagonal, torch.int64), upper=0)


@lowering(aten.triu.default)
def triu(ctx: LoweringContext, self: ir.Value, diagonal: Size = 0) -> ir.Value:
    """triu(Tensor self, SymInt diagonal=0) -> Tensor"""
    return ctx.op.Trilu(self, ctx.scalar(diagonal, torch.int64), upper=1)


# -- masked_scatter ----------------------------------------------------------------------------------------------


@lowering(aten.masked_scatter.default)
def masked_scatter(ctx: LoweringContext, self: ir.Value, mask: ir.Value, source: ir.Value) -> ir.Value:
    """masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor"""
    op = ctx.op
    if mask.dtype != ir.DataType.BOOL:
        raise ctx.refuse("torch refuses masks that are not boolean")
    sizes = tuple(ctx.out.shape)
    count = ctx.fake(source).numel()
    words = "masked_scatter: expected the source to have as many elements as the mask has ones"
    if isinstance(count, int) and count == 0:
        expanded = op.Expand(self, ctx.shape(sizes))
        return expanded if is_empty(sizes) else stop_if(ctx, any_of(ctx, mask), expanded, words, len(sizes))
    chosen = op.Expand(mask, ctx.shape(sizes))
    flat = op.Reshape(chosen, [-1])
    # Entries that are not set read any valid index; a source that may be empty gets one. Those that are set and find
    # no value read out of bounds.
    places = from_either_end(ctx, op.Where(flat, ordinals(ctx, flat), 0), count)
    given = op.Reshape(source, [-1])
    if not has_elements(count):
        wanted = op.ReduceSum(ctx.cast(flat, torch.int64), keepdims=0)
        given = stop_if(ctx, op.Greater(wanted, op.Size(given)), given, words, 1)
        given = op.Concat(given, zeros(ctx, source, [1]), axis=0)
    values = ctx.reshape(op.Gather(given, places, axis=0), sizes)
    return op.Where(chosen, values, self)


@lowering(aten.masked_scatter_backward.default)
def masked_scatter_backward(
    ctx: LoweringContext, grad_output: ir.Value, mask: ir.Value, sizes: Sequence[Size]
) -> ir.Value:
    """masked_scatter_backward(Tensor grad_output, Tensor mask, SymInt[] sizes) -> Tensor"""
    op = ctx.op
    count = math.prod(sizes)
    chosen = op.Expand(ctx.cast(mask, torch.bool), ctx.shape(ctx.sizes(grad_output)))
    flat = op.Reshape(chosen, [-1])
    # One index more than asked for takes the entries that are not set.
    places = op.Where(flat, ordinals(ctx, flat), ctx.scalar(count, torch.int64))
    gathered = op.ScatterElements(zeros(ctx, grad_output, [count + 1]), places, op.Reshape(grad_output, [-1]), axis=0)
    return ctx.reshape(op.Slice(gathered, [0], ctx.shape([count])), sizes)


# -- a size that the caller gives --------------------------------------------------------------------------------


@lowering(aten.nonzero_static.default)
def nonzero_static(ctx: LoweringContext, self: ir.Value, *, size: Size, fill_value: int = -1) -> ir.Value:
    """nonzero_static(Tensor self, *, SymInt size, int fill_value=-1) -> Tensor"""
    op = ctx.op
    filler = op.Expand(ctx.constant(fill_value, torch.int64), ctx.shape(ctx.out.shape))
    if ctx.rank(self) == 0 or is_empty(ctx.sizes(self)):
        return filler
    found = op.Transpose(op.NonZero(ctx.cast(self, torch.bool)), perm=[1, 0])
    return op.Slice(op.Concat(found, filler, axis=0), [0], ctx.shape([size]), [0])


@lowering(aten.repeat_interleave.Tensor)
def repeat_interleave(ctx: LoweringContext, repeats: ir.Value, *, output_size: Size | None = None) -> ir.Value:
    """repeat_interleave.Tensor(Tensor repeats, *, SymInt? output_size=None) -> Tensor"""
    op = ctx.op
    (count,) = ctx.out.shape
    if is_unbacked(count):
        raise ctx.refuse(_DATA)
    # An entry's run index is the number of runs that end before it.
    counts = ctx.cast(repeats, torch.int64)
    if not is_empty(ctx.sizes(repeats)):
        negative = op.Less(op.ReduceMin(counts, keepdims=0), 0)
        counts = stop_if(ctx, negative, counts, "repeats can not be negative", 1)
    ends = running_sum(ctx, counts)
    ones = op.Expand(ctx.constant(1, torch.int64), op.Shape(ends))
    ended = op.ScatterElements(zeros(ctx, ends, [count + 1]), ends, ones, axis=0, reduction="add")
    total = running_sum(ctx, ended)
    return ctx.cast(op.Slice(total, [0], ctx.shape([count])), ctx.out.dtype)


# -- refused -----------------------------------------------------------------------------------------------------

_DATA = "the size of the result depends on the data"


keep_in_eager(
    _DATA,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
)
