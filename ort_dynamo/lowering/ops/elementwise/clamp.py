"""Elementwise functions of three operands: clamps, interpolation, fused multiply-adds."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number
from ort_dynamo.lowering.recipes.promotion import INT_TO_FLOAT, promote
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten, inductor_prims


@lowering(aten.clamp.default, aten.clamp_min.default)
def clamp(ctx: LoweringContext, self: ir.Value, min: Number | None = None, max: Number | None = None) -> ir.Value:
    """clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"""
    bounds = [bound for bound in (min, max) if bound is not None]
    (x, *_), dtype = promote(ctx, self, *bounds)
    if ctx.out.dtype == torch.uint8 and any(isinstance(bound, int) and bound < 0 for bound in bounds):
        # It has no effect in torch 2.15, and wraps in older releases.
        raise ctx.refuse("a negative bound of uint8")
    return ctx.cast(clamped(ctx, x, min, max, dtype), ctx.out.dtype)


def clamped(ctx: LoweringContext, x: ir.Value, low: Number | None, high: Number | None, dtype: torch.dtype) -> ir.Value:
    """Clamp `x`, whose dtype is `dtype`, to bounds that may be missing, symbolic or NaN, which gives NaN."""
    bounds = [bound for bound in (low, high) if bound is not None]
    if any(isinstance(bound, float) and math.isnan(bound) for bound in bounds):
        return ctx.op.Expand(ctx.constant(math.nan, dtype), ctx.shape(ctx.out.shape))
    if any(isinstance(bound, torch.SymFloat) for bound in bounds):  # one may be NaN, which Clip leaves out
        result = x if low is None else ctx.op.Max(x, ctx.element(low, dtype))
        return result if high is None else ctx.op.Min(result, ctx.element(high, dtype))
    # The default of a missing bound of Clip is the largest finite value, not infinity.
    infinite = math.inf if dtype.is_floating_point else None
    least = infinite and -infinite if low is None else low
    most = infinite if high is None else high
    return ctx.op.Clip(x, *(None if bound is None else ctx.element(bound, dtype) for bound in (least, most)))


@lowering(aten.clamp.Tensor, aten.clamp_min.Tensor)
def clamp_tensor(
    ctx: LoweringContext, self: ir.Value, min: ir.Value | None = None, max: ir.Value | None = None
) -> ir.Value:
    """clamp.Tensor(Tensor self, Tensor? min=None, Tensor? max=None) -> Tensor"""
    (result, *bounds), _ = promote(ctx, self, *(bound for bound in (min, max) if bound is not None))
    if min is not None:
        result = ctx.op.Max(result, bounds[0])
    if max is not None:
        result = ctx.op.Min(result, bounds[-1])
    return ctx.cast(result, ctx.out.dtype)


@lowering(aten.clamp_max.default)
def clamp_max(ctx: LoweringContext, self: ir.Value, max: Number) -> ir.Value:
    """clamp_max(Tensor self, Scalar max) -> Tensor"""
    return clamp(ctx, self, None, max)


@lowering(aten.clamp_max.Tensor)
def clamp_max_tensor(ctx: LoweringContext, self: ir.Value, max: ir.Value) -> ir.Value:
    """clamp_max.Tensor(Tensor self, Tensor max) -> Tensor"""
    return clamp_tensor(ctx, self, None, max)


@lowering(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: LoweringContext, self: ir.Value, end: ir.Value, weight: ir.Value | Number) -> ir.Value:
    """lerp.Tensor(Tensor self, Tensor end, Tensor weight) -> Tensor"""
    op = ctx.op
    if isinstance(weight, ir.Value):
        (a, b, w), dtype = promote(ctx, self, end, weight)
    else:
        (a, b), dtype = promote(ctx, self, end)
        w = ctx.scalar(weight, dtype)
    difference = op.Sub(b, a)
    # The two forms of torch's kernel: each is exact at its own end.
    near = op.Add(a, op.Mul(w, difference))
    far = op.Sub(b, op.Mul(difference, op.Sub(1.0, w)))
    if isinstance(weight, (int, float)):
        result = near if abs(weight) < 0.5 else far
    else:
        result = op.Where(op.Less(op.Abs(w), 0.5), near, far)
    return ctx.cast(result, ctx.out.dtype)


@lowering(aten.addcmul.default)
def addcmul(
    ctx: LoweringContext, self: ir.Value, tensor1: ir.Value, tensor2: ir.Value, *, value: Number = 1
) -> ir.Value:
    """addcmul(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    if ctx.out.dtype == torch.bool:
        raise ctx.refuse("bools")  # torch has no kernel for them
    (a, b, c), dtype = promote(ctx, self, tensor1, tensor2)
    if not (isinstance(value, (int, float)) and value == 1):
        b = ctx.op.Mul(b, ctx.scalar(value, dtype))
    return ctx.cast(ctx.op.Add(a, ctx.op.Mul(b, c)), ctx.out.dtype)


@lowering(aten.addcdiv.default)
def addcdiv(
    ctx: LoweringContext, self: ir.Value, tensor1: ir.Value, tensor2: ir.Value, *, value: Number = 1
) -> ir.Value:
    """addcdiv(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor"""
    (a, b, c), dtype = promote(ctx, self, tensor1, tensor2, kind=INT_TO_FLOAT)
    if not (isinstance(value, (int, float)) and value == 1):
        b = ctx.op.Mul(b, ctx.scalar(value, dtype))
    return ctx.cast(ctx.op.Add(a, ctx.op.Div(b, c)), ctx.out.dtype)


@lowering(inductor_prims.fma)
def fma(ctx: LoweringContext, a: ir.Value, b: ir.Value | Number, c: ir.Value | Number) -> ir.Value:
    """fma(Tensor a, Tensor b, Tensor c) -> Tensor"""
    # Dynamo makes it of addcmul and addcdiv by a tensor; torch's own kernel of it rounds twice, too.
    (x, y, z), _ = promote(ctx, a, b, c)
    return ctx.cast(ctx.op.Add(ctx.op.Mul(x, y), z), ctx.out.dtype)
