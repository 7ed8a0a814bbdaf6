"""Loss functions with their gradients, those that AOTAutograd leaves whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.elementwise.activation import log1p_exp
from ort_dynamo.lowering.recipes.checks import outside, outside_or_nan, stop_if_any
from ort_dynamo.lowering.recipes.promotion import float_dtype, promote
from ort_dynamo.lowering.recipes.sums.accurate_sum import total
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.lowering.symbols import broadcast, same_sizes
from ort_dynamo.torch_internals.kernels.operators import aten

_NONE, _MEAN, _SUM = 0, 1, 2  # torch.nn._reduction

Formula = Callable[[LoweringContext, ir.Value, ir.Value, float], ir.Value]
"""formula(ctx, input, target, parameter): the loss of each entry, or its derivative by the input."""


# -- losses of one entry -----------------------------------------------------------------------------------------


def _squared(ctx: LoweringContext, x: ir.Value, t: ir.Value, _: float) -> ir.Value:
    difference = ctx.op.Sub(x, t)
    return ctx.op.Mul(difference, difference)


def _squared_slope(ctx: LoweringContext, x: ir.Value, t: ir.Value, _: float) -> ir.Value:
    return ctx.op.Mul(ctx.op.Sub(x, t), 2.0)


def _smooth_l1(ctx: LoweringContext, x: ir.Value, t: ir.Value, beta: float) -> ir.Value:
    op = ctx.op
    difference = op.Sub(x, t)
    if beta == 0:
        return op.Abs(difference)
    return op.Mul(_rounded_off(op, difference, beta), 1 / beta)


def _smooth_l1_slope(ctx: LoweringContext, x: ir.Value, t: ir.Value, beta: float) -> ir.Value:
    op = ctx.op
    difference = op.Sub(x, t)
    if beta == 0:
        # torch's kernel tests `x <= -beta` first, so the slope at zero is -1.
        return op.Where(op.LessOrEqual(difference, 0.0), -1.0, op.Where(op.IsNaN(difference), difference, 1.0))
    return op.Clip(op.Div(difference, beta), -1.0, 1.0)


def _huber(ctx: LoweringContext, x: ir.Value, t: ir.Value, delta: float) -> ir.Value:
    return _rounded_off(ctx.op, ctx.op.Sub(x, t), delta)


def _rounded_off(op: OpBuilder, d: ir.Value, limit: float) -> ir.Value:
    """d² / 2 up to the limit l, and l (|d| - l / 2) beyond: m (d - m / 2) with m = d between -l and l."""
    least = op.Clip(d, -limit, limit)
    return op.Mul(least, op.Sub(d, op.Mul(least, 0.5)))


def _huber_slope(ctx: LoweringContext, x: ir.Value, t: ir.Value, delta: float) -> ir.Value:
    return ctx.op.Clip(ctx.op.Sub(x, t), -delta, delta)


def _soft_margin(ctx: LoweringContext, x: ir.Value, t: ir.Value, _: float) -> ir.Value:
    return ctx.op.Log(ctx.op.Add(_exponential(ctx, x, t), 1.0))


def _soft_margin_slope(ctx: LoweringContext, x: ir.Value, t: ir.Value, _: float) -> ir.Value:
    op = ctx.op
    z = _exponential(ctx, x, t)
    return op.Neg(op.Div(op.Mul(t, z), op.Add(z, 1.0)))


def _exponential(ctx: LoweringContext, x: ir.Value, t: ir.Value) -> ir.Value:
    """exp(-x t). torch keeps it in the operands' dtype, so that of float16 overflows."""
    assert x.dtype is not None
    return ctx.op.Cast(ctx.cast(ctx.op.Exp(ctx.op.Neg(ctx.op.Mul(x, t))), ctx.out.dtype), to=x.dtype)


def _entropy(ctx: LoweringContext, x: ir.Value, t: ir.Value, _: float) -> ir.Value:
    # log(1 - x) is off by half an ulp of 1 at most, for any x.
    op = ctx.op
    yes = op.Max(op.Log(x), -100.0)
    no = op.Max(op.Log(op.Sub(1.0, x)), -100.0)
    return op.Sub(op.Mul(op.Sub(t, 1.0), no), op.Mul(t, yes))


def _entropy_slope(ctx: LoweringContext, x: ir.Value, t: ir.Value, _: float) -> ir.Value:
    op = ctx.op
    return op.Div(op.Sub(x, t), op.Max(op.Mul(op.Sub(1.0, x), x), 1e-12))


# -- the reduction around them -----------------------------------------------------------------------------------


def _loss(
    formula: Formula,
    ctx: LoweringContext,
    self: ir.Value,
    target: ir.Value,
    reduction: int = _MEAN,
    parameter: float = 1.0,
) -> ir.Value:
    """mse_loss(Tensor self, Tensor target, int reduction=Mean) -> Tensor"""
    if formula is _smooth_l1 and parameter < 0:
        raise ctx.refuse("torch refuses a negative beta")
    (x, t), _ = promote(ctx, self, target)
    losses = formula(ctx, x, t, parameter)
    return ctx.cast(_reduce(ctx, losses, reduction, self, target), ctx.out.dtype)


def _loss_backward(
    formula: Formula,
    ctx: LoweringContext,
    grad_output: ir.Value,
    self: ir.Value,
    target: ir.Value,
    reduction: int,
    parameter: float = 1.0,
) -> ir.Value:
    """mse_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction) -> Tensor"""
    (grad, x, t), dtype = promote(ctx, grad_output, self, target)
    grad = _per_entry(ctx, grad, reduction, self, dtype)
    return ctx.cast(ctx.op.Mul(formula(ctx, x, t, parameter), grad), ctx.out.dtype)


for _forward, _backward, _formula, _slope in (
    (aten.mse_loss.default, aten.mse_loss_backward.default, _squared, _squared_slope),
    (aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default, _smooth_l1, _smooth_l1_slope),
    (aten.huber_loss.default, aten.huber_loss_backward.default, _huber, _huber_slope),
    (aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default, _soft_margin, _soft_margin_slope),
):
    register(_forward, functools.partial(_loss, _formula))
    register(_backward, functools.partial(_loss_backward, _slope))


def _reduce(ctx: LoweringContext, losses: ir.Value, reduction: int, *operands: ir.Value) -> ir.Value:
    """`losses`, of the common shape of `operands`, reduced."""
    if reduction == _NONE:
        return losses
    first = operands[0]
    alike = all(same_sizes(ctx.sizes(first), ctx.sizes(other)) for other in operands)
    sizes = ctx.sizes(first) if alike else broadcast(*map(ctx.sizes, operands))
    summed = total(ctx, losses, sizes, range(len(sizes)), keepdim=False) if sizes else losses
    if reduction == _SUM:
        return summed
    dtype = float_dtype(ctx.out.dtype)
    # A quotient, not ReduceMean: the mean of nothing is nan.
    count = ctx.scalar(ctx.fake(first).numel(), dtype) if alike else ctx.cast(ctx.op.Size(losses), dtype)
    return ctx.op.Div(summed, count)


def _per_entry(ctx: LoweringContext, grad: ir.Value, reduction: int, self: ir.Value, dtype: torch.dtype) -> ir.Value:
    """Return the gradient of each entry's loss, from the gradient of the reduced loss."""
    if reduction != _MEAN:
        return grad
    return ctx.op.Div(grad, ctx.scalar(ctx.fake(self).numel(), dtype))


# -- binary cross-entropy ----------------------------------------------------------------------------------------


@lowering(aten.binary_cross_entropy.default)
def binary_cross_entropy(
    ctx: LoweringContext, self: ir.Value, target: ir.Value, weight: ir.Value | None = None, reduction: int = _MEAN
) -> ir.Value:
    """binary_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=Mean) -> Tensor"""
    (x, t, *w), _ = promote(ctx, self, target, *([weight] if weight is not None else []))
    losses = _entropy(ctx, x, t, 0.0)
    losses = ctx.op.Mul(losses, w[0]) if w else losses
    reduced = _checked(ctx, _reduce(ctx, losses, reduction, self, target), ctx.sizes(self), x, t)
    return ctx.cast(reduced, ctx.out.dtype)


def _checked(ctx: LoweringContext, reduced: ir.Value, sizes: Sequence[Size], x: ir.Value, t: ir.Value) -> ir.Value:
    """Return the losses, with the checks of eager's kernel; their gradient has none.

    The loss of an input that is NaN or not in [0, 1] is NaN, as one of the logarithms is; so is that of a NaN target.
    """
    if is_empty(sizes):
        return reduced
    op, rank = ctx.op, ctx.out.dim()
    suspect = op.Or(op.IsNaN(op.ReduceSum(reduced, keepdims=0) if rank else reduced), outside(op, t, 0.0, 1.0))
    checks = [
        (
            functools.partial(outside_or_nan, value=value, low=0.0, high=1.0),
            f"all elements of {name} should be between 0 and 1",
        )
        for name, value in (("input", x), ("target", t))
    ]
    return stop_if_any(ctx, suspect, reduced, checks, rank)


@lowering(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(
    ctx: LoweringContext,
    grad_output: ir.Value,
    self: ir.Value,
    target: ir.Value,
    weight: ir.Value | None = None,
    reduction: int = _MEAN,
) -> ir.Value:
    """binary_cross_entropy_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight=None, int reduction=Mean) -> Tensor"""  # noqa: E501
    (grad, x, t, *w), dtype = promote(ctx, grad_output, self, target, *([weight] if weight is not None else []))
    grad = _per_entry(ctx, grad, reduction, self, dtype)
    grad = ctx.op.Mul(grad, w[0]) if w else grad
    return ctx.cast(ctx.op.Mul(_entropy_slope(ctx, x, t, 0.0), grad), ctx.out.dtype)


@lowering(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    ctx: LoweringContext,
    self: ir.Value,
    target: ir.Value,
    weight: ir.Value | None = None,
    pos_weight: ir.Value | None = None,
    reduction: int = _MEAN,
) -> ir.Value:
    """binary_cross_entropy_with_logits(Tensor self, Tensor target, Tensor? weight=None, Tensor? pos_weight=None, int reduction=Mean) -> Tensor"""  # noqa: E501
    # (1 - t) x + (1 + (pos_weight - 1) t) softplus(-x)
    op = ctx.op
    weights = [value for value in (weight, pos_weight) if value is not None]
    (x, t, *_), dtype = promote(ctx, self, target, *weights)
    soft = log1p_exp(ctx, op.Neg(x))
    if pos_weight is not None:
        soft = op.Mul(soft, op.Add(op.Mul(op.Sub(ctx.cast(pos_weight, dtype), 1.0), t), 1.0))
    losses = op.Add(op.Mul(op.Sub(1.0, t), x), soft)
    if weight is not None:
        losses = op.Mul(losses, ctx.cast(weight, dtype))
    return ctx.cast(_reduce(ctx, losses, reduction, self, target, *weights), ctx.out.dtype)
