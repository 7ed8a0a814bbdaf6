"""Distances between the rows of matrices, with their gradients."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.ops.reductions.reduction import norm
from ort_dynamo.lowering.recipes.promotion import promote
from ort_dynamo.lowering.recipes.sums.accurate_sum import total
from ort_dynamo.lowering.recipes.sums.add_rows import add_rows
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.symbols import broadcast
from ort_dynamo.torch_internals.kernels.operators import aten

_LARGEST = 1 << 26
"""Differences between all pairs of rows, entry by entry, that are still held in memory at once."""


@lowering(aten.dist.default)
def dist(ctx: LoweringContext, self: ir.Value, other: ir.Value, p: float = 2) -> ir.Value:
    """dist(Tensor self, Tensor other, Scalar p=2) -> Tensor"""
    (a, b), _ = promote(ctx, self, other)
    difference = ctx.op.Reshape(ctx.op.Sub(a, b), [-1])
    sizes = broadcast(ctx.sizes(self), ctx.sizes(other))
    return ctx.cast(norm(ctx, difference, [math.prod(sizes)], p, [0], False), ctx.out.dtype)


def _differences(ctx: LoweringContext, x1: ir.Value, x2: ir.Value, distances: torch.Tensor) -> ir.Value:
    """x1[..., i, k] - x2[..., j, k] at [..., i, j, k], for the fake tensor of distances at [..., i, j]."""
    count: Size = distances.numel() * ctx.sizes(x1)[-1]
    if isinstance(count, int) and count > _LARGEST:
        raise ctx.refuse(f"it would need {count} row differences in memory at once")
    return ctx.op.Sub(ctx.op.Unsqueeze(x1, [-2]), ctx.op.Unsqueeze(x2, [-3]))


@lowering(aten._cdist_forward.default)
def cdist(ctx: LoweringContext, x1: ir.Value, x2: ir.Value, p: float, compute_mode: int | None) -> ir.Value:
    """_cdist_forward(Tensor x1, Tensor x2, float p, int? compute_mode) -> Tensor"""
    if is_empty((*ctx.out.shape, ctx.sizes(x1)[-1])):
        return filled(ctx, 0)
    difference = _differences(ctx, x1, x2, ctx.out)
    sizes = [*ctx.out.shape, ctx.sizes(x1)[-1]]
    return norm(ctx, difference, sizes, p, [ctx.out.dim()], False)


@lowering(aten._cdist_backward.default)
def cdist_backward(
    ctx: LoweringContext, grad: ir.Value, x1: ir.Value, x2: ir.Value, p: float, cdist: ir.Value
) -> ir.Value:
    """_cdist_backward(Tensor grad, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor"""
    op = ctx.op
    if is_empty((*ctx.sizes(grad), *ctx.sizes(x1))):
        return filled(ctx, 0)
    slope = _slope(
        ctx, _differences(ctx, x1, x2, ctx.fake(grad)), op.Unsqueeze(grad, [-1]), op.Unsqueeze(cdist, [-1]), p
    )
    rank = ctx.rank(grad)
    return total(ctx, slope, [*ctx.sizes(grad), ctx.sizes(x1)[-1]], [rank - 1], False)


def _slope(ctx: LoweringContext, difference: ir.Value, grad: ir.Value, distance: ir.Value, p: float) -> ir.Value:
    """Give grad times the derivative of `distance`, the p-norm of `difference`, by each entry; 0 if undefined."""
    op = ctx.op
    assert difference.dtype is not None
    sign = op.Sign(difference)
    if p == 0:
        return op.Mul(difference, 0.0)
    if p == 1:
        return op.Mul(grad, sign)
    none = op.Equal(distance, 0.0)
    if p == 2:
        return op.Mul(op.Where(none, 0.0, op.Div(grad, distance)), difference)
    size = op.Abs(difference)
    if p == math.inf:
        return op.Mul(op.Mul(grad, sign), op.Cast(op.Equal(size, distance), to=difference.dtype))
    if p < 1:
        none = op.Or(none, op.Equal(difference, 0.0))
    power = ctx.builder.constant(p - 1.0, difference.dtype)
    scaled = op.Mul(sign, op.Div(op.Mul(op.Pow(size, power), grad), op.Pow(distance, power)))
    return op.Where(none, 0.0, scaled)


# -- all pairs of one matrix -------------------------------------------------------------------------------------


def _pairs(ctx: LoweringContext, self: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the rows of each pair i < j, in order of i, then j."""
    op, count = ctx.op, ctx.sizes(self)[0]
    upper = op.Trilu(op.Expand(ctx.constant(1, torch.int64), ctx.shape([count, count])), 1, upper=1)
    first, second = op.Split(op.NonZero(upper), axis=0, num_outputs=2, _outputs=2)
    return op.Reshape(first, [-1]), op.Reshape(second, [-1])


@lowering(aten._pdist_forward.default)
def pdist(ctx: LoweringContext, self: ir.Value, p: float = 2) -> ir.Value:
    """_pdist_forward(Tensor self, float p=2) -> Tensor"""
    op = ctx.op
    if is_empty((*ctx.out.shape, *ctx.sizes(self))):
        return filled(ctx, 0)
    first, second = _pairs(ctx, self)
    difference = op.Sub(op.Gather(self, first, axis=0), op.Gather(self, second, axis=0))
    return norm(ctx, difference, [*ctx.out.shape, ctx.sizes(self)[1]], p, [1], False)


@lowering(aten._pdist_backward.default)
def pdist_backward(ctx: LoweringContext, grad: ir.Value, self: ir.Value, p: float, pdist: ir.Value) -> ir.Value:
    """_pdist_backward(Tensor grad, Tensor self, float p, Tensor pdist) -> Tensor"""
    op = ctx.op
    if is_empty((*ctx.sizes(grad), *ctx.sizes(self))):
        return filled(ctx, 0)
    first, second = _pairs(ctx, self)
    difference = op.Sub(op.Gather(self, first, axis=0), op.Gather(self, second, axis=0))
    slope = _slope(ctx, difference, op.Unsqueeze(grad, [1]), op.Unsqueeze(pdist, [1]), p)
    width = ctx.sizes(self)[1]
    table = add_rows(ctx, zeros(ctx, slope, ctx.sizes(self)), first, slope, width)
    return ctx.reshape(add_rows(ctx, table, second, op.Neg(slope), width), ctx.sizes(self))
