"""Activation functions of straight pieces, and their gradients."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.elementwise.clamp import clamped
from ort_dynamo.lowering.recipes.branches import all_finite, either, is_small
from ort_dynamo.lowering.recipes.promotion import promote
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten

_FLOAT = ir.DataType.FLOAT


def _passed(ctx: LoweringContext, dy: ir.Value, blocked: ir.Value) -> ir.Value:
    """Return the gradient `dy`, zero where `blocked`.

    Where on the CPU materializes both sides; in onnxruntime-training it takes ten times as long as a multiplication by
    the mask. The multiplication would turn an infinite gradient of a blocked element into nan.
    """
    assert dy.dtype is not None
    dtype, zero = dy.dtype, ctx.builder.constant(0, dy.dtype)
    if not ctx.target.facts.walks_entries or not dtype.is_floating_point() or is_small(ctx.out.shape):
        return ctx.op.Where(blocked, zero, dy)
    passed = ctx.op.Cast(ctx.op.Not(blocked), to=dtype)
    (result,) = either(
        ctx, all_finite(ctx, dy), lambda op: [op.Mul(dy, passed)], lambda op: [op.Where(blocked, zero, dy)]
    )
    return result


# -- one bend ----------------------------------------------------------------------------------------------------


@lowering(aten.threshold.default)
def threshold(ctx: LoweringContext, self: ir.Value, threshold: Number, value: Number) -> ir.Value:
    """threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor"""
    if ctx.out.dtype == torch.bool:
        raise ctx.refuse("bools")  # torch has no kernel for them
    (x,), dtype = promote(ctx, self)
    limit = ctx.scalar(threshold, dtype) if dtype.is_floating_point else ctx.element(threshold, dtype)
    filler = ctx.element(value, dtype)
    return ctx.cast(ctx.op.Where(ctx.op.LessOrEqual(x, limit), filler, x), ctx.out.dtype)


@lowering(aten.threshold_backward.default)
def threshold_backward(ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, threshold: Number) -> ir.Value:
    """threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor"""
    (dy, x), dtype = promote(ctx, grad_output, self)
    return ctx.cast(_passed(ctx, dy, ctx.op.LessOrEqual(x, ctx.scalar(threshold, dtype))), ctx.out.dtype)


@lowering(aten._prelu_kernel.default)
def prelu(ctx: LoweringContext, self: ir.Value, weight: ir.Value) -> ir.Value:
    """_prelu_kernel(Tensor self, Tensor weight) -> Tensor"""
    (x, slope), _ = promote(ctx, self, weight)

    def as_greater(op: OpBuilder) -> list[ir.Value]:
        return [op.Max(x, op.Mul(x, slope))]

    def in_products(op: OpBuilder) -> list[ir.Value]:
        return [op.Add(op.Max(x, 0.0), op.Mul(op.Min(x, 0.0), slope))]

    def in_choices(op: OpBuilder) -> list[ir.Value]:
        return [op.Where(op.Greater(x, 0.0), x, op.Mul(x, slope))]

    def without_choices(op: OpBuilder) -> list[ir.Value]:
        return list(either(ctx, finite, in_products, in_choices, op=op, place="steep "))

    if not ctx.target.facts.walks_entries or is_small(ctx.out.shape):
        return ctx.cast(in_choices(ctx.op)[0], ctx.out.dtype)
    # PRelu takes 4.7 ns an element or, in onnxruntime-training, makes nan of infinity.
    finite = all_finite(ctx, slope)
    (result,) = either(ctx, _in_unit_interval(ctx, slope), as_greater, without_choices)
    return ctx.cast(result, ctx.out.dtype)


def _in_unit_interval(ctx: LoweringContext, value: ir.Value) -> ir.Value:
    """Compute, as a 0-d bool, whether every element is in (0, 1]."""
    op = ctx.op
    assert value.dtype is not None
    least = float(np.finfo(value.dtype.numpy()).tiny)
    return op.Equal(op.ReduceSum(op.Abs(op.Sub(value, op.Clip(value, least, 1.0))), keepdims=0), 0.0)


# -- shrinks -----------------------------------------------------------------------------------------------------


@lowering(aten.softshrink.default)
def softshrink(ctx: LoweringContext, self: ir.Value, lambd: Number = 0.5) -> ir.Value:
    """softshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    # The CPU's Shrink takes 5 ns an element, and gives 0 for nan.
    (x,), dtype = promote(ctx, self)
    op, limit = ctx.op, ctx.scalar(lambd, dtype)
    return ctx.cast(op.Sub(x, op.Clip(x, op.Neg(limit), limit)), ctx.out.dtype)


@lowering(aten.hardshrink.default)
def hardshrink(ctx: LoweringContext, self: ir.Value, lambd: Number = 0.5) -> ir.Value:
    """hardshrink(Tensor self, Scalar lambd=0.5) -> Tensor"""
    ctx.check_range(lambd)
    (x,), dtype = promote(ctx, self)
    op, limit = ctx.op, ctx.scalar(lambd, dtype)
    if not ctx.target.facts.walks_entries or not (isinstance(lambd, (int, float)) and math.isfinite(lambd)):
        return ctx.cast(op.Where(op.LessOrEqual(op.Abs(x), limit), ctx.scalar(0, dtype), x), ctx.out.dtype)
    # Infinite elements are beyond the limit; nan times zero is still nan.
    return ctx.cast(op.Mul(x, op.Cast(op.Greater(op.Abs(x), limit), to=x.dtype)), ctx.out.dtype)


@lowering(aten.softshrink_backward.default, aten.hardshrink_backward.default)
def shrink_backward(ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, lambd: Number) -> ir.Value:
    """softshrink_backward(Tensor grad_output, Tensor self, Scalar lambd) -> Tensor"""
    (dy, x), dtype = promote(ctx, grad_output, self)
    return ctx.cast(_passed(ctx, dy, ctx.op.LessOrEqual(ctx.op.Abs(x), ctx.scalar(lambd, dtype))), ctx.out.dtype)


# -- two bends ---------------------------------------------------------------------------------------------------


@lowering(aten.hardtanh.default)
def hardtanh(ctx: LoweringContext, self: ir.Value, min_val: Number = -1, max_val: Number = 1) -> ir.Value:
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    (x,), dtype = promote(ctx, self)
    return ctx.cast(clamped(ctx, x, min_val, max_val, dtype), ctx.out.dtype)


@lowering(aten.hardtanh_backward.default)
def hardtanh_backward(
    ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, min_val: Number, max_val: Number
) -> ir.Value:
    """hardtanh_backward(Tensor grad_output, Tensor self, Scalar min_val, Scalar max_val) -> Tensor"""
    (dy, x), dtype = promote(ctx, grad_output, self)
    op = ctx.op
    low, high = ctx.scalar(min_val, dtype), ctx.scalar(max_val, dtype)
    blocked = op.Or(op.LessOrEqual(x, low), op.GreaterOrEqual(x, high))
    return ctx.cast(_passed(ctx, dy, blocked), ctx.out.dtype)


@lowering(aten.hardsigmoid.default)
def hardsigmoid(ctx: LoweringContext, self: ir.Value) -> ir.Value:
    """hardsigmoid(Tensor self) -> Tensor"""
    (x,), _ = promote(ctx, self)
    return ctx.cast(_hardsigmoid(ctx, x), ctx.out.dtype)


@lowering(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(ctx: LoweringContext, grad_output: ir.Value, self: ir.Value) -> ir.Value:
    """hardsigmoid_backward(Tensor grad_output, Tensor self) -> Tensor"""
    (dy, x), _ = promote(ctx, grad_output, self)
    op = ctx.op
    # torch's kernel has the sixth of a float32 in every dtype.
    slope = op.Mul(dy, float(np.float32(1) / np.float32(6)))
    return ctx.cast(_passed(ctx, slope, op.Not(op.Less(op.Abs(x), 3.0))), ctx.out.dtype)


@lowering(aten.hardswish.default)
def hardswish(ctx: LoweringContext, self: ir.Value) -> ir.Value:
    """hardswish(Tensor self) -> Tensor"""
    (x,), _ = promote(ctx, self)
    return ctx.cast(ctx.op.Mul(x, _hardsigmoid(ctx, x)), ctx.out.dtype)


@lowering(aten.hardswish_backward.default)
def hardswish_backward(ctx: LoweringContext, grad_output: ir.Value, self: ir.Value) -> ir.Value:
    """hardswish_backward(Tensor grad_output, Tensor self) -> Tensor"""
    (dy, x), _ = promote(ctx, grad_output, self)

    def in_choices(op: OpBuilder) -> list[ir.Value]:
        low = op.Where(op.LessOrEqual(x, -3.0), 0.0, op.Mul(dy, op.Add(op.Div(x, 3.0), 0.5)))
        return [op.Where(op.GreaterOrEqual(x, 3.0), dy, op.Where(op.IsNaN(x), dy, low))]

    def in_products(op: OpBuilder) -> list[ir.Value]:
        # x / 3 + 1/2 between -3 and 3, where it is 2 h - 1/2; beyond, 0 and 1. HardSigmoid is a step of one ulp, too.
        ramp = op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
        inside = op.HardSigmoid(x, alpha=_PER_ULP, beta=3 * _PER_ULP)  # 1 above -3
        beyond = op.HardSigmoid(x, alpha=_PER_ULP, beta=1 - 3 * _PER_ULP)  # 1 from 3 on
        return [op.Mul(op.Sub(op.Add(ramp, ramp), op.Mul(op.Add(inside, beyond), 0.5)), dy)]

    if x.dtype != _FLOAT or not ctx.target.facts.walks_entries or is_small(ctx.out.shape):
        return ctx.cast(in_choices(ctx.op)[0], ctx.out.dtype)
    finite = ctx.op.And(all_finite(ctx, x), all_finite(ctx, dy))
    (result,) = either(ctx, finite, in_products, in_choices)
    return ctx.cast(result, ctx.out.dtype)


_PER_ULP = float(1 << 22)
"""The inverse of the distance between adjacent float32 values from 2 to 4."""


def _hardsigmoid(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    if x.dtype == _FLOAT:
        return op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
    return op.Div(op.Clip(op.Add(x, 3.0), 0.0, 6.0), 6.0)
