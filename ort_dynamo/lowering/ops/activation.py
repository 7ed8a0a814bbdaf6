"""Activation functions and their gradients.

Those that torch's decompositions already write in a few elementwise operators (mish, hardshrink, glu, the
gradients of the piecewise linear ones …) are not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number, Size
from ort_dynamo.lowering.ops.error_function import erf
from ort_dynamo.lowering.ops.unary import log1p
from ort_dynamo.lowering.recipes.approximation import fit, polynomial
from ort_dynamo.lowering.recipes.branches import all_finite, either
from ort_dynamo.lowering.recipes.promotion import promote
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.operators import aten

_FLOAT = ir.DataType.FLOAT
_TANH_SCALE = math.sqrt(2 / math.pi)  # Hendrycks & Gimpel, "Gaussian Error Linear Units", eq. 2
_TANH_CUBE = 0.044715


def _is_one(number: Number) -> bool:
    return isinstance(number, (int, float)) and number == 1


def _has(ctx: LoweringContext, op_type: str, value: ir.Value) -> bool:
    return value.dtype is not None and ctx.target.takes(op_type, "com.microsoft", {"T": value.dtype})


# -- gelu --------------------------------------------------------------------------------------------------------


@lowering(aten.gelu.default)
def gelu(ctx: LoweringContext, self: ir.Value, *, approximate: str = "none") -> ir.Value:
    """gelu(Tensor self, *, str approximate='none') -> Tensor"""
    (x,), _ = promote(ctx, self)
    kernel = "Gelu" if approximate == "none" else "FastGelu"
    if _has(ctx, kernel, x):
        return ctx.cast(getattr(ctx.contrib, kernel)(x), ctx.out.dtype)
    op = ctx.op
    if approximate == "none":
        result = op.Mul(op.Mul(x, 0.5), op.Add(erf(ctx, op.Mul(x, math.sqrt(0.5))), 1.0))
    else:
        result = _x_sigmoid(ctx, x, _doubled_tanh_argument(ctx, x))
    return ctx.cast(result, ctx.out.dtype)


@lowering(aten.gelu_backward.default)
def gelu_backward(ctx: LoweringContext, grad: ir.Value, self: ir.Value, *, approximate: str = "none") -> ir.Value:
    """gelu_backward(Tensor grad_output, Tensor self, *, str approximate='none') -> Tensor"""
    # The training build's GeluGrad runs on one thread: these nine nodes took two thirds of its time on two cores.
    (dy, x), _ = promote(ctx, grad, self)
    slope = _gelu_slope(ctx, x) if approximate == "none" else _gelu_tanh_slope(ctx, x)
    return ctx.cast(ctx.op.Mul(dy, slope), ctx.out.dtype)


def _gelu_slope(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Φ(x) + x φ(x), which with s = x / √2 is (1 + erf s) / 2 + s / (√π exp s²)."""
    op = ctx.op
    s = op.Mul(x, math.sqrt(0.5))
    if x.dtype == _FLOAT:
        cumulative = op.HardSigmoid(op.Erf(s), alpha=0.5, beta=0.5)  # in one pass; its clamp does nothing here
    else:
        cumulative = op.Add(op.Mul(erf(ctx, s), 0.5), 0.5)
    return op.Add(op.Mul(op.Div(s, op.Exp(op.Mul(s, s))), 1 / math.sqrt(math.pi)), cumulative)


def _gelu_tanh_slope(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """The slope of x σ(w), w = 2 √(2/π) (x + c x³), which is x (1 + tanh(w / 2)) / 2: σ (1 + x w' (1 − σ))."""
    op = ctx.op
    w = _doubled_tanh_argument(ctx, x)
    sigmoid = op.Sigmoid(w)
    bend = op.Sub(op.Mul(w, 3.0), op.Mul(x, 4 * _TANH_SCALE))  # x w' = 3 w − 4 √(2/π) x
    return op.Mul(sigmoid, op.Add(op.Mul(bend, op.Sub(1.0, sigmoid)), 1.0))


def _doubled_tanh_argument(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    return op.Mul(x, op.Add(op.Mul(op.Mul(x, x), 2 * _TANH_SCALE * _TANH_CUBE), 2 * _TANH_SCALE))


# -- sigmoid, tanh, relu and their relatives -----------------------------------------------------------------------


@lowering(aten.silu.default)
def silu(ctx: LoweringContext, self: ir.Value) -> ir.Value:
    """silu(Tensor self) -> Tensor"""
    (x,), _ = promote(ctx, self)
    if _has(ctx, "QuickGelu", x):
        return ctx.cast(ctx.contrib.QuickGelu(x, alpha=1.0), ctx.out.dtype)
    return ctx.cast(_x_sigmoid(ctx, x, x), ctx.out.dtype)


def _x_sigmoid(ctx: LoweringContext, x: ir.Value, w: ir.Value) -> ir.Value:
    # Not x * Sigmoid(w): defect sigmoid_product_fusion.
    return ctx.op.Div(x, ctx.op.Add(ctx.op.Exp(ctx.op.Neg(w)), 1.0))


@lowering(aten.silu_backward.default)
def silu_backward(ctx: LoweringContext, grad_output: ir.Value, self: ir.Value) -> ir.Value:
    """silu_backward(Tensor grad_output, Tensor self) -> Tensor"""
    (dy, x), _ = promote(ctx, grad_output, self)
    op = ctx.op
    sigmoid = op.Sigmoid(x)
    slope = op.Mul(sigmoid, op.Add(op.Mul(x, op.Sub(1.0, sigmoid)), 1.0))
    return ctx.cast(op.Mul(dy, slope), ctx.out.dtype)


@lowering(aten.sigmoid_backward.default)
def sigmoid_backward(ctx: LoweringContext, grad_output: ir.Value, output: ir.Value) -> ir.Value:
    """sigmoid_backward(Tensor grad_output, Tensor output) -> Tensor"""
    (dy, y), _ = promote(ctx, grad_output, output)
    op = ctx.op
    return ctx.cast(op.Mul(op.Mul(dy, op.Sub(1.0, y)), y), ctx.out.dtype)


@lowering(aten.tanh_backward.default)
def tanh_backward(ctx: LoweringContext, grad_output: ir.Value, output: ir.Value) -> ir.Value:
    """tanh_backward(Tensor grad_output, Tensor output) -> Tensor"""
    (dy, y), _ = promote(ctx, grad_output, output)
    op = ctx.op
    return ctx.cast(op.Mul(dy, op.Sub(1.0, op.Mul(y, y))), ctx.out.dtype)


@lowering(aten.threshold.default)
def threshold(ctx: LoweringContext, self: ir.Value, threshold: Number, value: Number) -> ir.Value:
    """threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor"""
    if ctx.out.dtype == torch.bool:
        raise ctx.refuse("bools")  # torch has no kernel for them
    (x,), dtype = promote(ctx, self)
    limit, filler = ctx.scalar(threshold, dtype), ctx.scalar(value, dtype)
    return ctx.cast(ctx.op.Where(ctx.op.LessOrEqual(x, limit), filler, x), ctx.out.dtype)


_SMALL = 1 << 12
"""Entries up to which a Where takes less time than asking whether all are finite."""


def _is_small(sizes: Sequence[Size]) -> bool:
    count = math.prod(sizes)
    return isinstance(count, int) and count <= _SMALL


@lowering(aten.threshold_backward.default)
def threshold_backward(ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, threshold: Number) -> ir.Value:
    """threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor"""
    (dy, x), dtype = promote(ctx, grad_output, self)
    op, limit = ctx.op, ctx.scalar(threshold, dtype)
    blocked, zero = op.LessOrEqual(x, limit), ctx.constant(0, dtype)
    if ctx.target.walks_entries and dtype.is_floating_point and not _is_small(ctx.sizes(grad_output)):
        # The CPU's Where makes either side as a tensor; onnxruntime-training's takes six times as long as a product
        # with the mask. The product would make nan of an infinite gradient at a blocked element.
        passed = ctx.cast(op.Not(blocked), dtype)
        (result,) = either(
            ctx, all_finite(ctx, dy), lambda op: [op.Mul(dy, passed)], lambda op: [op.Where(blocked, zero, dy)]
        )
    else:
        result = op.Where(blocked, zero, dy)
    return ctx.cast(result, ctx.out.dtype)


@lowering(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(ctx: LoweringContext, self: ir.Value) -> tuple[ir.Value | None, ir.Value | None]:
    """log_sigmoid_forward(Tensor self) -> (Tensor output, Tensor buffer)"""
    (x,), _ = promote(ctx, self)
    op = ctx.op
    output, buffer = ctx.out
    if 1 not in ctx.used:
        second = None
    elif buffer.numel() == 0:
        second = op.Expand(ctx.constant(0, buffer.dtype), ctx.shape(buffer.shape))
    else:
        second = ctx.cast(op.Exp(op.Neg(op.Abs(x))), buffer.dtype)
    return ctx.cast(op.Neg(log1p_exp(ctx, op.Neg(x))), output.dtype), second


@lowering(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, buffer: ir.Value) -> ir.Value:
    """log_sigmoid_backward(Tensor grad_output, Tensor self, Tensor buffer) -> Tensor"""
    (dy, x), _ = promote(ctx, grad_output, self)
    return ctx.cast(ctx.op.Mul(dy, ctx.op.Sigmoid(ctx.op.Neg(x))), ctx.out.dtype)


def log1p_exp(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """log(1 + exp(x)) as max(x, 0) + log(1 + y), y = exp(-|x|).

    In float32, log(1 + y) = 2 artanh(z), z = y / (2 + y) at most 1/3, whose even part is a polynomial of six terms: a
    fifth of the time of the CPU's Softplus, which is for float32 alone, and half of that of a logarithm.
    """
    op = ctx.op
    if x.dtype == _FLOAT and not ctx.target.walks_entries:
        return op.Softplus(x)
    y = op.Exp(op.Neg(op.Abs(x)))
    if x.dtype == _FLOAT:
        z = op.Div(y, op.Add(y, 2.0))
        even = polynomial(op, op.Sub(op.Mul(op.Mul(z, z), 18.0), 1.0), fit(_doubled_artanh_ratio, 6))
        return op.Add(op.Max(x, 0.0), op.Mul(z, even))
    return op.Add(op.Max(x, 0.0), log1p(ctx, y))


def _doubled_artanh_ratio(t: Any) -> Any:
    """2 artanh(z) / z, where t in -1 … 1 is 18 z² - 1."""
    z = mpmath.sqrt((t + 1) / 18)
    return 2 * mpmath.atanh(z) / z


@lowering(aten.softplus.default)
def softplus(ctx: LoweringContext, self: ir.Value, beta: Number = 1, threshold: Number = 20) -> ir.Value:
    """softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor"""
    (x,), dtype = promote(ctx, self)
    op = ctx.op
    plain = isinstance(beta, (int, float)) and beta == 1  # a comparison of a symbolic number would install a guard
    scaled = x if plain else op.Mul(x, ctx.scalar(beta, dtype))
    result = log1p_exp(ctx, scaled)
    if not plain:
        result = op.Div(result, ctx.scalar(beta, dtype))
    # Above the threshold torch gives x itself. Above 40 the two agree to the last digit of a float64, above 20 of a
    # float32.
    if not (isinstance(threshold, (int, float)) and threshold >= (20 if dtype == torch.float32 else 40)):
        result = op.Where(op.Greater(scaled, ctx.scalar(threshold, dtype)), x, result)
    return ctx.cast(result, ctx.out.dtype)


# -- piecewise ---------------------------------------------------------------------------------------------------


@lowering(aten.leaky_relu.default)
def leaky_relu(ctx: LoweringContext, self: ir.Value, negative_slope: Number = 0.01) -> ir.Value:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    (x,), dtype = promote(ctx, self)
    op = ctx.op
    if (
        ctx.target.has_defect("slow_leaky_relu")
        and isinstance(negative_slope, (int, float))
        and 0 < negative_slope <= 1
    ):
        return ctx.cast(op.Max(x, op.Mul(x, ctx.scalar(negative_slope, dtype))), ctx.out.dtype)
    if x.dtype == _FLOAT and isinstance(negative_slope, (int, float)):
        return ctx.cast(op.LeakyRelu(x, alpha=float(negative_slope)), ctx.out.dtype)
    return ctx.cast(op.Where(op.Greater(x, 0.0), x, op.Mul(x, ctx.scalar(negative_slope, dtype))), ctx.out.dtype)


@lowering(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, negative_slope: Number, self_is_result: bool
) -> ir.Value:
    """leaky_relu_backward(Tensor grad_output, Tensor self, Scalar negative_slope, bool self_is_result) -> Tensor"""
    (dy, x), dtype = promote(ctx, grad_output, self)
    op, slope = ctx.op, ctx.scalar(negative_slope, dtype)
    positive = op.Greater(x, 0.0)
    if (
        isinstance(negative_slope, (int, float)) and 0 <= negative_slope <= 1
    ):  # 1 or the slope, without a Where: its kernels are slow
        result = op.Mul(dy, op.Max(ctx.cast(positive, dtype), slope))
    else:
        result = op.Where(positive, dy, op.Mul(dy, slope))
    return ctx.cast(result, ctx.out.dtype)


@lowering(aten.elu.default)
def elu(
    ctx: LoweringContext, self: ir.Value, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1
) -> ir.Value:
    """elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor"""
    (x,), dtype = promote(ctx, self)
    op = ctx.op
    if (
        isinstance(alpha, (int, float))
        and isinstance(scale, (int, float))
        and _is_one(input_scale)
        and x.dtype == _FLOAT
    ):
        result = op.Elu(x, alpha=float(alpha))
        return ctx.cast(result if scale == 1 else op.Mul(result, float(scale)), ctx.out.dtype)
    factors = [ctx.scalar(number, dtype) for number in (alpha, scale, input_scale)]
    low = op.Mul(op.Mul(op.Min(x, 0.0), 0.5), factors[2])
    # expm1(2 h) = tanh(h) * (exp(2 h) + 1)
    negative = op.Mul(op.Mul(op.Tanh(low), op.Add(op.Exp(op.Add(low, low)), 1.0)), op.Mul(factors[0], factors[1]))
    return ctx.cast(op.Where(op.Greater(x, 0.0), op.Mul(x, factors[1]), negative), ctx.out.dtype)


@lowering(aten.hardtanh.default)
def hardtanh(ctx: LoweringContext, self: ir.Value, min_val: Number = -1, max_val: Number = 1) -> ir.Value:
    """hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor"""
    (x,), dtype = promote(ctx, self)
    return ctx.cast(ctx.op.Clip(x, ctx.scalar(min_val, dtype), ctx.scalar(max_val, dtype)), ctx.out.dtype)


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
    return ctx.cast(op.Where(op.Less(op.Abs(x), 3.0), slope, 0.0), ctx.out.dtype)


@lowering(aten.hardswish.default)
def hardswish(ctx: LoweringContext, self: ir.Value) -> ir.Value:
    """hardswish(Tensor self) -> Tensor"""
    (x,), _ = promote(ctx, self)
    return ctx.cast(ctx.op.Mul(x, _hardsigmoid(ctx, x)), ctx.out.dtype)


def _hardsigmoid(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    if x.dtype == _FLOAT:
        return op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
    return op.Div(op.Clip(op.Add(x, 3.0), 0.0, 6.0), 6.0)
