"""The grid of an affine map (torch.nn.functional.affine_grid); its gradient is a matmul already."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.recipes.promotion import promote
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten


@lowering(aten.affine_grid_generator.default)
def affine_grid_generator(ctx: LoweringContext, theta: ir.Value, size: Sequence[Size], align_corners: bool) -> ir.Value:
    """affine_grid_generator(Tensor theta, SymInt[] size, bool align_corners) -> Tensor"""
    # A position of the grid is a sum over the axes, and only the last axis, along which it lies in memory, has a term
    # for each of its entries. So it is a matmul: of (1, the coordinates along the other axes) for each line, and of
    # lines.
    if is_empty(ctx.out.shape):
        return filled(ctx, 0)
    (matrix,), dtype = promote(ctx, theta)
    op = ctx.op
    count, *space = ctx.out.shape[:-1]
    rank = len(space)
    width = space[-1]
    columns = op.Transpose(matrix, perm=[0, 2, 1])  # (N, rank + 1, rank): by x, y, …, and the shift

    def column(place: int) -> ir.Value:
        return op.Slice(columns, [place], [place + 1], [1])

    along = op.Mul(ctx.reshape(_coordinates(ctx, width, align_corners, dtype), [width, 1]), column(0))
    lines = [op.Add(along, column(rank))]
    lines += [op.Expand(column(place), ctx.shape([1, width, 1])) for place in range(1, rank)]
    flat = [ctx.reshape(line, [count, 1, width * rank]) for line in lines]
    ones = op.Expand(ctx.constant(1, dtype), ctx.shape([*space[:-1], 1]))
    factors = [ones]
    for place in range(1, rank):
        axis = rank - 1 - place
        values = _coordinates(ctx, space[axis], align_corners, dtype)
        shaped = op.Reshape(values, [-1 if other == axis else 1 for other in range(rank)])
        factors.append(op.Mul(shaped, ones))
    left = ctx.reshape(op.Concat(*factors, axis=-1), [math.prod(space[:-1]), rank])
    grid = op.MatMul(left, op.Concat(*flat, axis=1))
    return ctx.cast(ctx.reshape(grid, ctx.out.shape), ctx.out.dtype)


def _coordinates(ctx: LoweringContext, size: Size, align_corners: bool, dtype: torch.dtype) -> ir.Value:
    """Return the positions along an axis of `size` pixels, between -1 and 1; 0 for a single one."""
    op = ctx.op
    if isinstance(size, int) and size == 1:
        return op.Reshape(ctx.constant(0.0, dtype), [1])
    zero, one = ctx.constant(0, torch.int64), ctx.constant(1, torch.int64)
    numbers = ctx.cast(op.Range(zero, ctx.scalar(size, torch.int64), one), dtype)
    doubled = op.Sub(op.Mul(numbers, 2.0), ctx.scalar(size - 1, dtype))
    return op.Div(doubled, ctx.scalar(size - 1 if align_corners else size, dtype))
