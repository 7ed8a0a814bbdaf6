"""Triangular systems, by a blocked inverse of the triangle.

The inverses of diagonal blocks give those of blocks of twice the size,

    [A 0; C B]^-1 = [A^-1 0; -B^-1 C A^-1 B^-1],

so log2(n) steps of batched matmuls compute the inverse. It is as exact as one by substitution (J. Du Croz and N.
Higham, Stability of methods for matrix inversion, 1992), but its product with the right sides is not: the residual may
be a hundred times that of substitution, and an infinite entry makes others NaN. So torch solves these systems by choice
(passes/fx/torch_graph/place_slower_operators.py). A session does if a program asks for it, and in a model that is a
file. Gated delta rules (Qwen3-Next, OLMo hybrid) solve two systems of 64 by 64 with the same triangle for each chunk
and head; ONNX Runtime inverts it once.

Milliseconds, float32, one thread, onnxruntime 1.31.1; matrices, size, right sides:

| | torch | here |
|---|---|---|
| 16, 64, 64 | 0.31 | 0.59 |
| 8, 256, 256 | 8.0 | 9.3 |
| 1, 512, 512 | 2.4 | 3.2 |
| 1, 1024, 16 | 0.26 | 23 |
| 4096, 8, 8 | 1.0 | 8.6 |

Calls like the last two are fallbacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.recipes.loops import Carried, repeat_while
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten


@lowering(aten.linalg_solve_triangular.default)
def solve_triangular(
    ctx: LoweringContext,
    self: ir.Value,
    b: ir.Value,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> ir.Value:
    """linalg_solve_triangular(Tensor self, Tensor B, *, bool upper, bool left=True, bool unitriangular=False) -> Tensor"""  # noqa: E501
    op = ctx.op
    size = ctx.sizes(self)[-1]
    if is_empty((*ctx.sizes(self), *ctx.sizes(b))):
        return filled(ctx, 0)
    _refuse_slow_shapes(ctx, size, ctx.sizes(b)[-1 if left else -2], ctx.sizes(self)[:-2])
    rank = ctx.rank(self)
    turn = [*range(rank - 2), rank - 1, rank - 2]
    lower = op.Transpose(self, perm=turn) if upper else self
    if isinstance(size, int):
        inverse = _inverse(ctx, lower, size, unitriangular)
    else:
        inverse = _inverse_of_any_size(ctx, lower, size, unitriangular)
    inverse = op.Reshape(inverse, op.Shape(self))
    if upper:
        inverse = op.Transpose(inverse, perm=turn)
    result: ir.Value = op.MatMul(inverse, b) if left else op.MatMul(b, inverse)
    return result


def _refuse_slow_shapes(ctx: LoweringContext, size: Size, sides: Size, batch: Sequence[Size]) -> None:
    known = [int(count) for count in batch if isinstance(count, int)]
    if not isinstance(size, int):
        return
    if size > 128 and isinstance(sides, int) and 4 * sides < size:
        raise ctx.refuse("ONNX has no substitution, and an inverse is far slower for few right-hand sides")
    if size < 16 and math.prod(known) > 256:
        raise ctx.refuse("ONNX Runtime is slow at many small matrices: it multiplies them one by one")


def _inverse(ctx: LoweringContext, lower: ir.Value, size: int, unitriangular: bool) -> ir.Value:
    """Return the inverse, (batch, size, size), of the lower triangle of (..., size, size); the rest is not read."""
    op = ctx.op
    whole = 1 << (size - 1).bit_length()
    more = whole - size  # pad with the identity, so that a block always splits in two
    diagonal = op.Gather(op.Reshape(lower, [-1, size * size]), [i * (size + 1) for i in range(size)], axis=1)
    ones = op.Expand(ctx.constant(1, ctx.out.dtype), op.Shape(diagonal))
    inverse = ones if unitriangular else op.Div(ones, diagonal)
    if more:
        lower = op.Pad(op.Reshape(lower, [-1, size, size]), [0, 0, 0, 0, more, more])
        inverse = op.Pad(inverse, [0, 0, 0, more], ctx.constant(1, ctx.out.dtype))
    inverse = op.Reshape(inverse, [-1, whole, 1, 1])
    width = 1
    while width < whole:
        blocks = whole // width
        # (batch, rows of blocks, columns of blocks, width, width); take the block left of each odd diagonal block.
        grid = op.Transpose(op.Reshape(lower, [-1, blocks, width, blocks, width]), perm=[0, 1, 3, 2, 4])
        below = [odd * blocks + odd - 1 for odd in range(1, blocks, 2)]
        off = op.Gather(op.Reshape(grid, [-1, blocks * blocks, width, width]), below, axis=1)
        first, second = (op.Gather(inverse, list(range(start, blocks, 2)), axis=1) for start in (0, 1))
        times = op.Mul if width == 1 else op.MatMul
        corner = op.Neg(times(times(second, off), first))
        upper_half = op.Pad(first, [0, 0, 0, 0, 0, 0, 0, width])
        inverse = op.Concat(upper_half, op.Concat(corner, second, axis=3), axis=2)
        width *= 2
    inverse = op.Reshape(inverse, [-1, whole, whole])
    return op.Slice(inverse, [0, 0], [size, size], [1, 2]) if more else inverse


def _inverse_of_any_size(ctx: LoweringContext, lower: ir.Value, size: Size, unitriangular: bool) -> ir.Value:
    """Compute `_inverse` for a symbolic size: each step uses whole matrices, with masks of the blocks."""
    op = ctx.op
    length = ctx.scalar(size, torch.int64)
    flat = op.Reshape(lower, ctx.shape([-1, size, size]))
    places = op.Range(ctx.constant(0, torch.int64), length, ctx.constant(1, torch.int64))
    row, column = op.Unsqueeze(places, [1]), op.Unsqueeze(places, [0])
    diagonal = op.Expand(op.Equal(row, column), op.Shape(flat))
    one, zero = ctx.constant(1, ctx.out.dtype), ctx.constant(0, ctx.out.dtype)
    start = op.Where(diagonal, one if unitriangular else op.Div(one, op.Where(diagonal, flat, one)), zero)

    def step(op: OpBuilder, carried: Carried) -> Carried:
        inverse, width = carried
        row_block = op.Div(row, width)
        below = op.And(op.Equal(op.Mod(row_block, 2), 1), op.Equal(op.Div(column, width), op.Sub(row_block, 1)))
        corners = op.MatMul(op.MatMul(inverse, op.Where(below, flat, zero)), inverse)
        return [op.Sub(inverse, corners), op.Mul(width, 2)]

    inverse, _ = repeat_while(
        ctx, [start, ctx.constant(1, torch.int64)], lambda op, carried: op.Less(carried[1], length), step
    )
    return inverse
