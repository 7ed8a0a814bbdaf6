"""Fractional max-pooling, whose windows lie where random samples put them, with its gradient.

B. Graham, Fractional Max-Pooling, 2014.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.ops.reductions.reduction import extremum, is_extremum
from ort_dynamo.lowering.recipes.branches import if_finite
from ort_dynamo.lowering.recipes.first_index import first_index
from ort_dynamo.lowering.recipes.positions import positions_along
from ort_dynamo.lowering.recipes.promotion import float_dtype
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import register
from ort_dynamo.torch_internals.kernels.operators import aten


def _pool(
    rank: int,
    ctx: LoweringContext,
    self: ir.Value,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    random_samples: ir.Value,
) -> tuple[ir.Value, ...]:
    """fractional_max_pool2d(Tensor self, int[2] kernel_size, int[2] output_size, Tensor random_samples) -> (Tensor, Tensor)"""  # noqa: E501
    op, dtype = ctx.op, ctx.dtype(self)
    if dtype not in (torch.float32, torch.float64):
        raise ctx.refuse(f"fractional pooling of {dtype}: torch places the windows by the rounding of that dtype")
    sizes = ctx.sizes(self)
    if is_empty(sizes):
        return tuple(ctx.op.Expand(ctx.constant(0, fake.dtype), ctx.shape(fake.shape)) for fake in ctx.out)
    kernel, out = _each(kernel_size, rank), _each(output_size, rank)
    # Samples of more images than there are may be given.
    samples = op.Slice(random_samples, [0], ctx.shape(_outer(ctx, self, rank)[:1]), [0])
    starts = _starts(ctx, samples, sizes[-rank:], out, kernel, dtype)
    places: ir.Value | None = None  # (N, C, *out, *kernel), counted through the image
    for index, (start, k) in enumerate(zip(starts, kernel, strict=True)):
        # (N, C, out) to a dimension of its own, and the elements under the window in another.
        start = op.Unsqueeze(start, [2 + i for i in range(2 * rank) if i != index])
        own = op.Add(start, positions_along(ctx, 2 + rank + index, k, 2 + 2 * rank))
        places = own if places is None else op.Add(op.Mul(places, ctx.scalar(sizes[index - rank], torch.int64)), own)
    assert places is not None
    outer = _outer(ctx, self, rank)
    flat = ctx.reshape(self, [*outer, math.prod(sizes[-rank:])])
    under, count = math.prod(kernel), math.prod(out)
    places = ctx.reshape(places, [*outer, count * under])
    values = ctx.reshape(op.GatherElements(flat, places, axis=2), [*outer, count, under])
    places = ctx.reshape(places, [*outer, count, under])

    def plain(op: OpBuilder) -> Sequence[ir.Value]:
        return [op.ArgMax(values, axis=3)]

    def with_nan(op: OpBuilder) -> Sequence[ir.Value]:
        nan = op.Cast(op.IsNaN(values), to=ir.DataType.INT32)
        some = op.Cast(op.ReduceMax(nan, [3], keepdims=1), to=ir.DataType.BOOL)
        return [op.Where(some, op.ArgMax(nan, axis=3, select_last_index=1), op.ArgMax(values, axis=3))]

    # The first of equal values, and the last nan.
    if ctx.target.has_defect("arg_max_of_equals"):
        best = _best(ctx, values, under)
    else:
        (best,) = if_finite(ctx, values, plain, with_nan)
    shape = ctx.out[0].shape
    return tuple(ctx.reshape(op.GatherElements(of, best, axis=3), shape) for of in (values, places))


def _best(ctx: LoweringContext, values: ir.Value, under: int) -> ir.Value:
    """Return the index of the greatest of the last axis' `under` values: the first one, or the last nan."""
    op, nan = ctx.op, ctx.op.IsNaN(values)
    kept = extremum(ctx, "ReduceMax", values, [3], True)
    first = first_index(ctx, is_extremum(ctx, values, kept), 3, under, 4)
    return op.Where(op.IsNaN(kept), first_index(ctx, nan, 3, under, 4, last=True), first)


def _each(numbers: Sequence[int], rank: int) -> list[int]:
    return list(numbers) * rank if len(numbers) == 1 else list(numbers)


def _outer(ctx: LoweringContext, self: ir.Value, rank: int) -> list[Size]:
    """Images and channels; one image may come without the first dimension."""
    sizes = list(ctx.sizes(self))[:-rank]
    return sizes if len(sizes) == 2 else [1, *sizes]


def _starts(
    ctx: LoweringContext,
    samples: ir.Value,
    sizes: Sequence[Size],
    out: Sequence[int],
    kernel: Sequence[int],
    dtype: torch.dtype,
) -> list[ir.Value]:
    """Compute the first index of each window along each dimension: int64 (N, C, out).

    The formula is torch's, in the tensor's dtype: floor((i + u) a) - floor(u a), with a = (size - kernel) / (out - 1).
    The last window ends at the tensor's end. In two dimensions the first sample belongs to the width; in three the
    samples are in the order of the dimensions.
    """
    op, rank = ctx.op, len(sizes)
    found = []
    for index in range(rank):
        sample = rank - 1 - index if rank == 2 else index
        u = op.Slice(samples, [sample], [sample + 1], [2])
        last = ctx.scalar(sizes[index] - kernel[index], torch.int64)
        places = positions_along(ctx, 2, out[index], 3)
        if out[index] > 1:
            step = op.Div(ctx.cast(last, dtype), float(out[index] - 1))
            ahead = op.Mul(op.Add(ctx.cast(places, dtype), u), step)
            starts = op.Sub(ctx.cast(ahead, torch.int64), ctx.cast(op.Mul(u, step), torch.int64))
        else:
            starts = op.Mul(ctx.cast(op.Floor(u), torch.int64), places)  # of shape (N, C, 1)
        found.append(op.Where(op.Equal(places, out[index] - 1), last, starts))
    return found


def _pool_backward(
    rank: int,
    ctx: LoweringContext,
    grad_output: ir.Value,
    self: ir.Value,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    indices: ir.Value,
) -> ir.Value:
    """fractional_max_pool2d_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] output_size, Tensor indices) -> Tensor"""  # noqa: E501
    sizes = ctx.sizes(self)
    if is_empty(sizes):
        return filled(ctx, 0)
    outer, places = _outer(ctx, self, rank), math.prod(sizes[-rank:])
    count = math.prod(ctx.sizes(grad_output)[-rank:])
    where = ctx.reshape(indices, [*outer, count])
    grad = ctx.reshape(ctx.cast(grad_output, float_dtype(ctx.out.dtype)), [*outer, count])
    none = zeros(ctx, grad, [*outer, places])
    total = ctx.op.ScatterElements(none, where, grad, axis=2, reduction="add")
    return ctx.cast(ctx.reshape(total, sizes), ctx.out.dtype)


for _rank, _forward, _backward in (
    (2, aten.fractional_max_pool2d.default, aten.fractional_max_pool2d_backward.default),
    (3, aten.fractional_max_pool3d.default, aten.fractional_max_pool3d_backward.default),
):
    register(_forward, functools.partial(_pool, _rank))
    register(_backward, functools.partial(_pool_backward, _rank))
