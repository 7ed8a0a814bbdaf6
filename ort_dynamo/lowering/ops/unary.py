"""Elementwise functions of one tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.promotion import DEFAULT, INT_TO_FLOAT, KIND, promote
from ort_dynamo.lowering.registry import lowering, register

aten = torch.ops.aten

Formula = Callable[[LoweringContext, ir.Value], ir.Value]


def is_float(value: ir.Value) -> bool:
    """Whether `value` has a floating-point dtype."""
    return value.dtype is not None and value.dtype.is_floating_point()


def truncate(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Round a floating-point value towards zero."""
    op = ctx.op
    return op.Mul(op.Sign(x), op.Floor(op.Abs(x)))


def sign_bit(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Whether the sign bit is set, so true for -0.0."""
    op = ctx.op
    return op.Less(op.Where(op.Equal(x, 0.0), op.Reciprocal(x), x), 0.0) if is_float(x) else op.Less(x, 0)


def two(ctx: LoweringContext, like: ir.Value) -> ir.Value:
    """The number 2 in the dtype of `like`, for Pow, whose operands share no type variable."""
    assert like.dtype is not None
    return ctx.builder.constant(2, like.dtype)


def _single(op_type: str) -> Formula:
    return lambda ctx, x: getattr(ctx.op, op_type)(x)


def _rounding(formula: Formula) -> Formula:
    """Rounding leaves integers as they are."""
    return lambda ctx, x: formula(ctx, x) if is_float(x) else x


def square_root(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """The square root of a floating-point value."""
    op = ctx.op
    if not _is_old(ctx):
        return op.Sqrt(x)
    # onnxruntime-training 1.19.2: the square root of inf is nan. The difference is 0, or inf, or nan.
    assert x.dtype is not None
    largest = float(np.finfo(x.dtype.numpy()).max)
    finite = op.Clip(x, -math.inf, largest)
    return op.Add(op.Sqrt(finite), op.Sub(x, finite))


def _erf(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    value = ctx.op.Erf(x)
    # onnxruntime-training 1.19.2: erf(nan) is 1. The clamp is 0 or nan.
    return ctx.op.Add(value, ctx.op.Clip(x, 0.0, 0.0)) if _is_old(ctx) else value


def _is_old(ctx: LoweringContext) -> bool:
    return ctx.target.package == "onnxruntime-training"


def _cos(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    assert x.dtype is not None
    if ctx.target.takes("Cos", "", {"T": x.dtype}):
        return ctx.op.Cos(x)
    return ctx.op.Sin(ctx.op.Add(x, math.pi / 2))


def _tan(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    if x.dtype == ir.DataType.FLOAT:
        return ctx.op.Tan(x)
    return ctx.op.Div(ctx.op.Sin(x), _cos(ctx, x))


def _sign(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    if x.dtype == ir.DataType.BOOL:
        return x
    op = ctx.op
    if not is_float(x):
        return op.Sign(x)
    # torch: the sign of nan is 0; ONNX Runtime: nan.
    positive, negative = (op.Cast(test, to=x.dtype) for test in (op.Greater(x, 0.0), op.Less(x, 0.0)))
    return op.Sub(positive, negative)


def _expm1(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    # exp(x) - 1 cancels near zero; the identity tanh(x/2) * (exp(x) + 1) does not.
    op = ctx.op
    return op.Mul(op.Tanh(op.Mul(x, 0.5)), op.Add(op.Exp(x), 1.0))


def log1p(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """log(1 + x), precise near zero: log(u) * x / (u - 1) with u = fl(1 + x) (Goldberg 1991, theorem 4)."""
    op = ctx.op
    u = op.Add(x, 1.0)
    ratio = op.Where(op.Equal(u, x), 1.0, op.Div(x, op.Sub(u, 1.0)))  # infinities and very large x
    return op.Where(op.Equal(u, 1.0), x, op.Mul(op.Log(u), ratio))


def _relu(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    return ctx.op.Relu(x) if is_float(x) else ctx.op.Max(x, 0)


def _bitwise_not(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    return ctx.op.Not(x) if x.dtype == ir.DataType.BOOL else ctx.op.BitwiseNot(x)


# Numerical Recipes in C, 2nd edition, section 6.2, erfcc: relative error below 1.2e-7 everywhere.
_ERFC = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807,
    -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223,
)  # fmt: skip


def _erfc(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    # 1 - erf(x) loses every digit of the tail.
    if x.dtype != ir.DataType.FLOAT:
        raise ctx.refuse("erfc in float64")
    op = ctx.op
    z = op.Abs(x)
    t = op.Reciprocal(op.Add(op.Mul(z, 0.5), 1.0))
    polynomial = functools.reduce(
        lambda p, c: op.Add(op.Mul(p, t), c), _ERFC[1:], ctx.constant(_ERFC[0], torch.float32)
    )
    tail = op.Mul(t, op.Exp(op.Sub(polynomial, op.Mul(z, z))))
    return op.Where(op.Less(x, 0.0), op.Sub(2.0, tail), tail)


def _float_test(formula: Formula, integers: bool) -> Formula:
    """A test of floating-point values whose answer for every integer is `integers`."""

    def test(ctx: LoweringContext, x: ir.Value) -> ir.Value:
        if is_float(x):
            return formula(ctx, x)
        return ctx.op.Expand(ctx.constant(integers, torch.bool), ctx.shape(ctx.out.shape))

    return test


_MATHEMATICAL: dict[torch._ops.OpOverload, Formula] = {
    aten.exp.default: _single("Exp"),
    aten.exp2.default: lambda ctx, x: ctx.op.Pow(two(ctx, x), x),
    aten.expm1.default: _expm1,
    aten.log.default: _single("Log"),
    aten.log2.default: lambda ctx, x: ctx.op.Mul(ctx.op.Log(x), 1 / math.log(2)),
    aten.log10.default: lambda ctx, x: ctx.op.Mul(ctx.op.Log(x), 1 / math.log(10)),
    aten.log1p.default: log1p,
    aten.sqrt.default: square_root,
    aten.rsqrt.default: lambda ctx, x: ctx.op.Reciprocal(square_root(ctx, x)),
    aten.reciprocal.default: _single("Reciprocal"),
    aten.sin.default: _single("Sin"),
    aten.cos.default: _cos,
    aten.tan.default: _tan,
    aten.asin.default: _single("Asin"),
    aten.acos.default: _single("Acos"),
    aten.atan.default: _single("Atan"),
    aten.sinh.default: _single("Sinh"),
    aten.cosh.default: _single("Cosh"),
    aten.asinh.default: _single("Asinh"),
    aten.acosh.default: _single("Acosh"),
    aten.atanh.default: _single("Atanh"),
    aten.tanh.default: _single("Tanh"),
    aten.sigmoid.default: _single("Sigmoid"),
    aten.erf.default: _erf,
    aten.erfc.default: _erfc,
}
"""Integers are computed in the default floating-point dtype."""

_TYPE_KEEPING: dict[torch._ops.OpOverload, Formula] = {
    aten.neg.default: _single("Neg"),
    aten.abs.default: lambda ctx, x: x if x.dtype == ir.DataType.BOOL else ctx.op.Abs(x),
    aten.sign.default: _sign,
    aten.sgn.default: _sign,
    aten.square.default: lambda ctx, x: ctx.op.Mul(x, x),
    aten.relu.default: _relu,
    aten.floor.default: _rounding(_single("Floor")),
    aten.ceil.default: _rounding(_single("Ceil")),
    aten.round.default: _rounding(_single("Round")),
    aten.trunc.default: _rounding(truncate),
    aten.frac.default: lambda ctx, x: ctx.op.Sub(x, truncate(ctx, x)),
    aten.bitwise_not.default: _bitwise_not,
}

_TESTS: dict[torch._ops.OpOverload, Formula] = {
    aten.logical_not.default: lambda ctx, x: ctx.op.Not(ctx.cast(x, torch.bool)),
    aten.signbit.default: sign_bit,
    aten.isnan.default: _float_test(_single("IsNaN"), False),
    aten.isinf.default: _float_test(_single("IsInf"), False),
    aten.isfinite.default: _float_test(lambda ctx, x: ctx.op.Less(ctx.op.Abs(x), math.inf), True),
    aten.isposinf.default: _float_test(lambda ctx, x: ctx.op.Equal(x, math.inf), False),
    aten.isneginf.default: _float_test(lambda ctx, x: ctx.op.Equal(x, -math.inf), False),
}
"""The answer is a bool."""


def _apply(formula: Formula, kind: KIND, ctx: LoweringContext, self: ir.Value) -> ir.Value:
    (value,), _ = promote(ctx, self, kind=kind)
    return ctx.cast(formula(ctx, value), ctx.out.dtype)


for _table, _kind in ((_MATHEMATICAL, INT_TO_FLOAT), (_TYPE_KEEPING, DEFAULT), (_TESTS, DEFAULT)):
    for _overload, _formula in _table.items():
        register(_overload, functools.partial(_apply, _formula, _kind))


@lowering(aten.round.decimals)
def round_decimals(ctx: LoweringContext, self: ir.Value, *, decimals: int) -> ir.Value:
    """round.decimals(Tensor self, *, int decimals) -> Tensor"""
    (x,), _ = promote(ctx, self)
    if not is_float(x):
        return self
    op = ctx.op
    # torch scales down by a division, not by a product with 0.1 ** decimals, which rounds differently.
    if decimals < 0:
        scaled = op.Mul(op.Round(op.Div(x, 10.0**-decimals)), 10.0**-decimals)
    else:
        scaled = op.Div(op.Round(op.Mul(x, 10.0**decimals)), 10.0**decimals)
    return ctx.cast(scaled, ctx.out.dtype)
