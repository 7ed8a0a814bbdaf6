"""Activation functions and their gradients; most of those of straight pieces are in a file of their own.

Those that torch's decompositions already write in a few elementwise operators (mish, glu …) are not here.
"""

from __future__ import annotations

import math
from typing import Any

import mpmath
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.elementwise.unary import log1p
from ort_dynamo.lowering.ops.special.error_function import erf
from ort_dynamo.lowering.recipes.approximation import fit, polynomial
from ort_dynamo.lowering.recipes.branches import all_finite, either, is_small
from ort_dynamo.lowering.recipes.promotion import promote
from ort_dynamo.lowering.recipes.sigmoid import sigmoid
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import known_true

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
    refused = kernel == "FastGelu" and ctx.out.dim() == 0  # defect fast_gelu_of_no_dimensions
    if _has(ctx, kernel, x) and not refused:
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
    """Φ(x) + x φ(x), which with s = x / √2 is (1 + erf s) / 2 + s / (√π exp s²).

    A fused kernel multiplies by exp(−s²), since a division takes more than ten instructions. Elsewhere, a division is
    one node less.
    """
    op = ctx.op
    s = op.Mul(x, math.sqrt(0.5))
    if x.dtype == _FLOAT:
        cumulative = op.HardSigmoid(op.Erf(s), alpha=0.5, beta=0.5)  # in one pass; its clamp does nothing here
    else:
        cumulative = op.Add(op.Mul(erf(ctx, s), 0.5), 0.5)
    square = op.Mul(s, s)
    density = op.Mul(s, op.Exp(op.Neg(square))) if ctx.target.fuses_kernels else op.Div(s, op.Exp(square))
    return op.Add(op.Mul(density, 1 / math.sqrt(math.pi)), cumulative)


def _gelu_tanh_slope(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Return the slope σ + σ (1 − σ) w' x of x σ(w) = x (1 + tanh(w / 2)) / 2, w = 2 √(2/π) (x + c x³).

    The CPU's Sigmoid is less exact than Exp: with it, the error is twice as large. Where w overflows, w' is finite and
    its factor 0.
    """
    op = ctx.op
    ratio = op.Sub(op.Mul(op.Mul(x, x), -2 * _TANH_SCALE * _TANH_CUBE), 2 * _TANH_SCALE)  # −w / x
    sigmoid = op.Reciprocal(op.Add(op.Exp(op.Mul(ratio, x)), 1.0))
    slope = op.Sub(op.Mul(ratio, -3.0), 4 * _TANH_SCALE)  # w' = 3 w / x − 4 √(2/π)
    bend = op.Mul(op.Mul(op.Mul(op.Sub(1.0, sigmoid), sigmoid), slope), x)
    return op.Add(bend, sigmoid)


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


@lowering(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(ctx: LoweringContext, self: ir.Value) -> tuple[ir.Value | None, ir.Value | None]:
    """log_sigmoid_forward(Tensor self) -> (Tensor output, Tensor buffer)"""
    (x,), _ = promote(ctx, self)
    op = ctx.op
    output, buffer = ctx.out
    if 1 not in ctx.used:
        second = None
    elif known_true(buffer.numel() == 0):
        second = op.Expand(ctx.constant(0, buffer.dtype), ctx.shape(buffer.shape))
    else:
        second = ctx.cast(op.Exp(op.Neg(op.Abs(x))), buffer.dtype)
    return ctx.cast(op.Neg(log1p_exp(ctx, op.Neg(x))), output.dtype), second


@lowering(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, buffer: ir.Value) -> ir.Value:
    """log_sigmoid_backward(Tensor grad_output, Tensor self, Tensor buffer) -> Tensor"""
    (dy, x), _ = promote(ctx, grad_output, self)
    return ctx.cast(ctx.op.Mul(dy, sigmoid(ctx, ctx.op.Neg(x))), ctx.out.dtype)


def log1p_exp(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """log(1 + exp(x)) as max(x, 0) + log(1 + y), y = exp(-|x|).

    In float32, log(1 + y) = 2 artanh(z), z = y / (2 + y) at most 1/3, whose even part is a polynomial of six terms: a
    fifth of the time of the CPU's Softplus, which is for float32 alone, and half of that of a logarithm.
    """
    op = ctx.op
    if x.dtype == _FLOAT and not ctx.target.facts.walks_entries:
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
    ctx.check_range(threshold)
    (x,), dtype = promote(ctx, self)
    op = ctx.op
    plain = isinstance(beta, (int, float)) and beta == 1  # a comparison of a symbolic scalar would install a guard
    scaled = x if plain else op.Mul(x, ctx.scalar(beta, dtype))
    result = log1p_exp(ctx, scaled)
    if not plain:
        result = op.Div(result, ctx.scalar(beta, dtype))
    # Above the threshold torch gives x itself. Above 40 the two agree to the last digit of a float64, above 20 of a
    # float32, unless x * beta overflows.
    agrees = isinstance(threshold, (int, float)) and threshold >= (20 if dtype == torch.float32 else 40)
    if not (agrees and isinstance(beta, (int, float)) and abs(beta) <= 1):
        result = op.Where(op.Greater(scaled, ctx.scalar(threshold, dtype)), x, result)
    return ctx.cast(result, ctx.out.dtype)


@lowering(aten.softplus_backward.default)
def softplus_backward(
    ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, beta: Number, threshold: Number
) -> ir.Value:
    """softplus_backward(Tensor grad_output, Tensor self, Scalar beta, Scalar threshold) -> Tensor"""
    ctx.check_range(threshold)
    (dy, x), dtype = promote(ctx, grad_output, self)
    op = ctx.op
    plain = isinstance(beta, (int, float)) and beta == 1
    scaled = x if plain else op.Mul(x, ctx.scalar(beta, dtype))
    result = op.Mul(dy, sigmoid(ctx, scaled))
    # Above the threshold the slope is 1, as in the forward; to the last digit where the threshold is high.
    if not (isinstance(threshold, (int, float)) and threshold >= (20 if dtype == torch.float32 else 40)):
        result = op.Where(op.Greater(scaled, ctx.scalar(threshold, dtype)), dy, result)
    return ctx.cast(result, ctx.out.dtype)


# -- leaky_relu, elu ---------------------------------------------------------------------------------------------


@lowering(aten.leaky_relu.default)
def leaky_relu(ctx: LoweringContext, self: ir.Value, negative_slope: Number = 0.01) -> ir.Value:
    """leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor"""
    ctx.check_range(negative_slope)
    (x,), dtype = promote(ctx, self)
    op = ctx.op
    if (
        ctx.target.has_defect("slow_leaky_relu")
        and isinstance(negative_slope, (int, float))
        and 0 < negative_slope <= 1
    ):
        return ctx.cast(op.Max(x, op.Mul(x, ctx.scalar(negative_slope, dtype))), ctx.out.dtype)
    # LeakyRelu multiplies no zero, which torch's kernel does.
    if x.dtype == _FLOAT and isinstance(negative_slope, (int, float)) and math.isfinite(negative_slope):
        return ctx.cast(op.LeakyRelu(x, alpha=float(negative_slope)), ctx.out.dtype)
    return ctx.cast(op.Where(op.Greater(x, 0.0), x, op.Mul(x, ctx.scalar(negative_slope, dtype))), ctx.out.dtype)


@lowering(aten.leaky_relu_backward.default)
def leaky_relu_backward(
    ctx: LoweringContext, grad_output: ir.Value, self: ir.Value, negative_slope: Number, self_is_result: bool
) -> ir.Value:
    """leaky_relu_backward(Tensor grad_output, Tensor self, Scalar negative_slope, bool self_is_result) -> Tensor"""
    if self_is_result and isinstance(negative_slope, (int, float)) and negative_slope < 0:
        raise ctx.refuse("torch refuses the gradient of an in-place leaky_relu with a negative slope")
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
    for number in (alpha, scale, input_scale):
        ctx.check_range(number)
    (x,), dtype = promote(ctx, self)
    op = ctx.op
    if (
        isinstance(alpha, (int, float))
        and isinstance(scale, (int, float))
        and _is_one(input_scale)
        and x.dtype == _FLOAT
    ):
        if ctx.target.facts.walks_entries and math.isfinite(alpha):
            # The formula of the CPU's Elu, which takes two to seven times as long; above zero its second part is zero.
            below = op.Mul(op.Sub(op.Exp(op.Min(x, 0.0)), 1.0), float(alpha))
            result = op.Add(op.Max(x, 0.0), below)
        else:
            result = op.Elu(x, alpha=float(alpha))
        return ctx.cast(result if scale == 1 else op.Mul(result, float(scale)), ctx.out.dtype)
    values = [ctx.scalar(number, dtype) for number in (alpha, scale, input_scale)]
    low = op.Mul(op.Mul(op.Min(x, 0.0), 0.5), values[2])
    # expm1(2 h) = tanh(h) * (exp(2 h) + 1)
    negative = op.Mul(op.Mul(op.Tanh(low), op.Add(op.Exp(op.Add(low, low)), 1.0)), op.Mul(values[0], values[1]))
    return ctx.cast(op.Where(op.Greater(x, 0.0), op.Mul(x, values[1]), negative), ctx.out.dtype)


@lowering(aten.elu_backward.default)
def elu_backward(
    ctx: LoweringContext,
    grad_output: ir.Value,
    alpha: Number,
    scale: Number,
    input_scale: Number,
    is_result: bool,
    self_or_result: ir.Value,
) -> ir.Value:
    """elu_backward(Tensor grad_output, Scalar alpha, Scalar scale, Scalar input_scale, bool is_result, Tensor self_or_result) -> Tensor"""  # noqa: E501
    if is_result and isinstance(alpha, (int, float)) and alpha < 0:
        raise ctx.refuse("torch refuses the gradient of an in-place elu with a negative alpha")
    (dy, x), dtype = promote(ctx, grad_output, self_or_result)
    alpha_, scale_, input_scale_ = (ctx.scalar(number, dtype) for number in (alpha, scale, input_scale))
    op = ctx.op
    most = op.Mul(alpha_, scale_)

    def low(op: OpBuilder, x: ir.Value) -> ir.Value:
        """Return the slope where `x` is not positive."""
        if is_result:
            return op.Mul(op.Add(x, most), input_scale_)
        # Two factors: ONNX Runtime drops one product that is 1 but for the digits of a float32.
        return op.Mul(op.Mul(op.Exp(op.Mul(x, input_scale_)), most), input_scale_)

    above = op.Greater(x, 0.0)

    def in_products(op: OpBuilder) -> list[ir.Value]:
        # Above zero the first part is its value at zero, which the second one turns into the scale.
        step = op.Sub(scale_, op.Mul(most, input_scale_))
        slope = op.Add(low(op, op.Min(x, 0.0)), op.Mul(op.Cast(above, to=x.dtype), step))
        return [op.Mul(dy, slope)]

    def in_choices(op: OpBuilder) -> list[ir.Value]:
        below = op.LessOrEqual(x, 0.0)
        return [op.Where(below, op.Mul(dy, low(op, x)), op.Mul(dy, scale_))]

    # A tiny step is dropped in the same way, which float64 would show.
    if x.dtype != _FLOAT or not ctx.target.facts.walks_entries or is_small(ctx.sizes(self_or_result)):
        return ctx.cast(in_choices(op)[0], ctx.out.dtype)
    (result,) = either(ctx, all_finite(ctx, x), in_products, in_choices)  # nan is not below zero
    return ctx.cast(result, ctx.out.dtype)
