"""Softmax, log-softmax and log-sum-exp with their gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.recipes.all_are import all_are
from ort_dynamo.lowering.recipes.promotion import INT_TO_FLOAT, float_dtype, promote
from ort_dynamo.lowering.recipes.sums.accurate_sum import total
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["softmax_gradient"]


def _normalise(op_type: str, ctx: LoweringContext, self: ir.Value, dim: int, half_to_float: bool) -> ir.Value:
    """_softmax(Tensor self, int dim, bool half_to_float) -> Tensor"""
    x = ctx.cast(self, ctx.out.dtype) if half_to_float else self
    if ctx.rank(self) == 0:
        return ctx.reshape(getattr(ctx.op, op_type)(ctx.reshape(x, [1]), axis=0), [])
    # The condition on float64 avoids the defect double_log_softmax.
    if _crosses_rows(ctx, ctx.rank(self), dim) or (op_type == "LogSoftmax" and x.dtype == ir.DataType.DOUBLE):
        return _by_formula(op_type, ctx, ctx.cast(x, float_dtype(ctx.out.dtype)), ctx.sizes(self), dim)
    return getattr(ctx.op, op_type)(x, axis=dim)


def _crosses_rows(ctx: LoweringContext, rank: int, dim: int) -> bool:
    """Check whether the CPU's kernels transpose for an axis, which takes several times as long as all else they do."""
    return ctx.target.facts.walks_entries and dim % rank != rank - 1


def _by_formula(op_type: str, ctx: LoweringContext, x: ir.Value, sizes: Sequence[Size], dim: int) -> ir.Value:
    op, a = ctx.op, dim % len(sizes)
    if is_empty(sizes):  # whose maximum does not exist
        return filled(ctx, 0)
    centred = op.Sub(x, op.ReduceMax(x, [a], keepdims=1))
    powers = op.Exp(centred)
    summed = total(ctx, powers, sizes, [a], keepdim=True)
    result = op.Div(powers, summed) if op_type == "Softmax" else op.Sub(centred, op.Log(summed))
    return ctx.cast(result, ctx.out.dtype)


register(aten._softmax.default, functools.partial(_normalise, "Softmax"))
register(aten._log_softmax.default, functools.partial(_normalise, "LogSoftmax"))


@lowering(aten._safe_softmax.default)
def safe_softmax(ctx: LoweringContext, self: ir.Value, dim: int, dtype: torch.dtype | None = None) -> ir.Value:
    """_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor"""
    op = ctx.op
    accumulate = float_dtype(ctx.out.dtype)
    x = ctx.cast(ctx.cast(self, ctx.out.dtype), accumulate)
    if ctx.rank(self) == 0:
        x = ctx.reshape(x, [1])
    result = ctx.cast(op.Where(_masked_rows(ctx, x, dim), 0.0, op.Softmax(x, axis=dim)), ctx.out.dtype)
    return ctx.reshape(result, []) if ctx.rank(self) == 0 else result


def _masked_rows(ctx: LoweringContext, x: ir.Value, dim: int) -> ir.Value:
    """Tell for each row, whose axis stays, whether all elements are -inf."""
    op = ctx.op
    if ctx.target.has_defect("extremes_of_infinity"):
        return all_are(op, x, -math.inf, [dim], keepdim=True)
    # The CPU's ReduceMax loses NaN, unless it comes first. The sum has it.
    bounds = op.ReduceMax(x, [dim], keepdims=1), op.ReduceSum(x, [dim], keepdims=1)
    return op.And(*(op.Equal(bound, -math.inf) for bound in bounds))


@lowering(aten._softmax_backward_data.default)
def softmax_backward(
    ctx: LoweringContext, grad_output: ir.Value, output: ir.Value, dim: int, input_dtype: torch.dtype
) -> ir.Value:
    """_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    accumulate = float_dtype(ctx.dtype(output))
    grad, y = ctx.cast(grad_output, accumulate), ctx.cast(output, accumulate)
    if ctx.rank(output) == 0:
        # y is 1 for every input; 0 * grad keeps nan and infinity as torch does.
        return ctx.cast(ctx.op.Mul(y, ctx.op.Sub(grad, ctx.op.Mul(grad, y))), input_dtype)
    return ctx.cast(softmax_gradient(ctx, grad, y, dim), input_dtype)


def softmax_gradient(ctx: LoweringContext, grad: ir.Value, y: ir.Value, dim: int) -> ir.Value:
    """y * (grad - sum(grad * y)), the gradient of y = softmax(x); `grad` and `y` share shape and dtype."""
    op = ctx.op
    own = ctx.target.takes("SoftmaxGrad_13", "com.microsoft", {"T": y.dtype or ir.DataType.UNDEFINED})
    if own and not _crosses_rows(ctx, ctx.out.dim(), dim):
        return ctx.contrib.SoftmaxGrad_13(grad, y, axis=dim)
    return op.Mul(y, op.Sub(grad, op.ReduceSum(op.Mul(grad, y), [dim], keepdims=1)))


@lowering(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    ctx: LoweringContext, grad_output: ir.Value, output: ir.Value, dim: int, input_dtype: torch.dtype
) -> ir.Value:
    """_log_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor"""
    # LogSoftmaxGrad_13 of the training build is not used: its CPU kernel takes five times as long as these four.
    op = ctx.op
    accumulate = float_dtype(ctx.dtype(output))
    grad, y = ctx.cast(grad_output, accumulate), ctx.cast(output, accumulate)
    summed = grad if ctx.rank(output) == 0 else op.ReduceSum(grad, [dim], keepdims=1)
    return ctx.cast(op.Sub(grad, op.Mul(op.Exp(y), summed)), input_dtype)


@lowering(aten.logsumexp.default)
def logsumexp(ctx: LoweringContext, self: ir.Value, dim: Sequence[int], keepdim: bool = False) -> ir.Value:
    """logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor"""
    # ReduceLogSumExp computes the same, but its CPU kernel takes five times as long as these nodes.
    op = ctx.op
    (x,), _ = promote(ctx, self, kind=INT_TO_FLOAT)
    if ctx.rank(self) == 0:
        return ctx.cast(op.Identity(x), ctx.out.dtype)
    axes = sorted(axis % ctx.rank(self) for axis in dim) or list(range(ctx.rank(self)))
    sizes = ctx.sizes(self)
    if is_empty(sizes[axis] for axis in axes):
        return filled(ctx, -math.inf)
    largest = op.ReduceMax(x, axes, keepdims=1)
    shift = op.Where(op.IsInf(largest), 0.0, largest)
    summed = total(ctx, op.Exp(op.Sub(x, shift)), sizes, axes, keepdim=True)
    result = op.Add(op.Log(summed), shift)
    if x.dtype == ir.DataType.DOUBLE:
        # Defect double_exp_of_infinity: else the logarithm were -708. The sum is 2.2e-308, or nan.
        result = op.Where(op.Equal(largest, -math.inf), op.Add(largest, summed), result)
    return ctx.cast(result if keepdim else op.Squeeze(result, axes), ctx.out.dtype)
