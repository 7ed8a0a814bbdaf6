"""Elementwise functions of one tensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.graph.marks import GATE
from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.recipes.promotion import DEFAULT, INT_TO_FLOAT, KIND, promote
from ort_dynamo.lowering.recipes.sigmoid import sigmoid
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten

Formula = Callable[[LoweringContext, ir.Value], ir.Value]


def is_float(value: ir.Value) -> bool:
    """Check whether `value` has a floating-point dtype."""
    return value.dtype is not None and value.dtype.is_floating_point()


def truncate(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Round a floating-point value towards zero."""
    op = ctx.op
    return op.Mul(op.Sign(x), op.Floor(op.Abs(x)))


def sign_bit(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Mark the elements whose sign bit is set, which holds for -0.0."""
    op = ctx.op
    return op.Less(op.Where(op.Equal(x, 0.0), op.Reciprocal(x), x), 0.0) if is_float(x) else op.Less(x, 0)


def two(ctx: LoweringContext, like: ir.Value) -> ir.Value:
    """Return the constant 2 in the dtype of `like`, for Pow, whose operands may differ in dtype."""
    assert like.dtype is not None
    return ctx.builder.constant(2, like.dtype)


def single(op_type: str) -> Formula:
    """One ONNX operator."""
    return lambda ctx, x: getattr(ctx.op, op_type)(x)


def _rounding(formula: Formula) -> Formula:
    """Make a lowering of a rounding; integers do not change."""
    return lambda ctx, x: formula(ctx, x) if is_float(x) else x


def square_root(ctx: LoweringContext, x: ir.Value, *, is_normal: bool = False) -> ir.Value:
    """Return the square root of a floating-point value.

    Args:
        ctx: the node's.
        x: the value.
        is_normal: whether no element is a subnormal number of float32.
    """
    op = ctx.op
    if x.dtype == ir.DataType.DOUBLE or not ctx.target.has_defect("sqrt_of_float32"):
        return op.Sqrt(x)
    assert x.dtype is not None
    finite = op.Clip(x, -math.inf, float(np.finfo(x.dtype.numpy()).max))
    beyond = op.Sub(x, finite)  # 0, or inf, or nan
    if is_normal or x.dtype == ir.DataType.FLOAT16:  # whose numbers are normal numbers of float32
        return op.Add(op.Sqrt(finite), beyond)
    is_tiny = op.Less(op.Abs(x), _TINY)
    root = op.Sqrt(op.Mul(finite, op.Where(is_tiny, 2.0**60, 1.0)))
    return op.Add(op.Mul(root, op.Where(is_tiny, 2.0**-30, 1.0)), beyond)


_TINY = 2.0**-100
"""Smaller numbers are scaled by 2**60, which makes a normal number of each subnormal one."""


def _sign(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    if x.dtype == ir.DataType.BOOL:
        return x
    op = ctx.op
    if not is_float(x):
        return op.Sign(x)
    # torch: the sign of nan is 0; ONNX Runtime: nan.
    positive, negative = (op.Cast(test, to=x.dtype) for test in (op.Greater(x, 0.0), op.Less(x, 0.0)))
    return op.Sub(positive, negative)


def _angle(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    negative = op.Cast(op.Less(x, 0.0), to=x.dtype)
    return op.Where(op.IsNaN(x), x, op.Mul(negative, math.pi))


def expm1(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """exp(x) - 1, precise near zero."""
    # exp(x) - 1 cancels near zero; the identity tanh(x/2) * (exp(x) + 1) does not.
    op = ctx.op
    return op.Mul(op.Tanh(op.Mul(x, 0.5)), op.Add(op.Exp(x), 1.0))


_GREAT = float(1 << 24)


def log1p(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Compute log(1 + x), precise near zero: log(u) + (x - (u - 1)) / u with u = fl(1 + x).

    The second term corrects the rounding of u (Kahan, HP-15C Advanced Functions Handbook, 1982). There is no Where,
    which is slow on the CPU. Large values and infinity are clipped in the correction, which they do not need, and the
    divisor is never zero.
    """
    op = ctx.op
    less = op.Min(x, _GREAT)
    u = op.Add(less, 1.0)
    lost = op.Div(op.Sub(less, op.Sub(u, 1.0)), op.Max(u, 1e-30))
    return op.Add(op.Log(op.Add(x, 1.0)), lost)


def _relu(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    return ctx.op.Relu(x) if is_float(x) else ctx.op.Max(x, 0)


def _bitwise_not(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    if x.dtype is None or x.dtype == ir.DataType.BOOL:
        return ctx.op.Not(x)
    if ctx.target.takes("BitwiseNot", "", {"T": x.dtype}):
        return ctx.op.BitwiseNot(x)
    return ctx.op.Sub(255 if x.dtype == ir.DataType.UINT8 else -1, x)


def _float_test(formula: Formula, integers: bool) -> Formula:
    """Return a test of floating-point values whose answer for every integer is `integers`."""

    def test(ctx: LoweringContext, x: ir.Value) -> ir.Value:
        if is_float(x):
            return formula(ctx, x)
        return ctx.op.Expand(ctx.constant(integers, torch.bool), ctx.shape(ctx.out.shape))

    return test


_MATHEMATICAL: dict[OpOverload, Formula] = {
    aten.exp.default: single("Exp"),
    aten.exp2.default: lambda ctx, x: ctx.op.Pow(two(ctx, x), x),
    aten.expm1.default: expm1,
    aten.log.default: single("Log"),
    aten.log2.default: lambda ctx, x: ctx.op.Mul(ctx.op.Log(x), 1 / math.log(2)),
    aten.log10.default: lambda ctx, x: ctx.op.Mul(ctx.op.Log(x), 1 / math.log(10)),
    aten.log1p.default: log1p,
    aten.sqrt.default: square_root,
    aten.rsqrt.default: lambda ctx, x: ctx.op.Reciprocal(square_root(ctx, x)),
    aten.reciprocal.default: single("Reciprocal"),
    aten.tanh.default: single("Tanh"),
    aten.sigmoid.default: lambda ctx, x: ctx.op.Sigmoid(x) if ctx.node.meta.get(GATE) else sigmoid(ctx, x),
    aten.angle.default: _angle,
}
"""Integers are computed in the default floating-point dtype."""

_TYPE_KEEPING: dict[OpOverload, Formula] = {
    aten.neg.default: single("Neg"),
    aten.abs.default: lambda ctx, x: x if x.dtype == ir.DataType.BOOL else ctx.op.Abs(x),
    aten.sign.default: _sign,
    aten.sgn.default: _sign,
    aten.square.default: lambda ctx, x: ctx.op.Mul(x, x),
    aten.relu.default: _relu,
    aten.floor.default: _rounding(single("Floor")),
    aten.ceil.default: _rounding(single("Ceil")),
    aten.round.default: _rounding(single("Round")),
    aten.trunc.default: _rounding(truncate),
    aten.frac.default: lambda ctx, x: ctx.op.Sub(x, truncate(ctx, x)),
    aten.bitwise_not.default: _bitwise_not,
}

_TESTS: dict[OpOverload, Formula] = {
    aten.logical_not.default: lambda ctx, x: ctx.op.Not(ctx.cast(x, torch.bool)),
    aten.signbit.default: sign_bit,
    aten.isnan.default: _float_test(single("IsNaN"), False),
    aten.isinf.default: _float_test(single("IsInf"), False),
    aten.isfinite.default: _float_test(lambda ctx, x: ctx.op.Less(ctx.op.Abs(x), math.inf), True),
    aten.isposinf.default: _float_test(lambda ctx, x: ctx.op.Equal(x, math.inf), False),
    aten.isneginf.default: _float_test(lambda ctx, x: ctx.op.Equal(x, -math.inf), False),
}
"""The answer is a bool."""


def _apply(formula: Formula, kind: KIND, ctx: LoweringContext, self: ir.Value) -> ir.Value:
    (value,), _ = promote(ctx, self, kind=kind)
    return ctx.cast(formula(ctx, value), ctx.out.dtype)


def register_table(table: Mapping[OpOverload, Formula], kind: KIND) -> None:
    """Register formulas of one operand, which they get in the dtype that torch computes in."""
    for overload, formula in table.items():
        register(overload, functools.partial(_apply, formula, kind))


register_table(_MATHEMATICAL, INT_TO_FLOAT)
register_table(_TYPE_KEEPING, DEFAULT)
register_table(_TESTS, DEFAULT)


@lowering(aten.round.decimals)
def round_decimals(ctx: LoweringContext, self: ir.Value, *, decimals: int) -> ir.Value:
    """round.decimals(Tensor self, *, int decimals) -> Tensor"""
    (x,), _ = promote(ctx, self)
    if not is_float(x):
        return self
    op = ctx.op
    # torch divides by 10 ** -decimals; a multiplication by 0.1 ** -decimals would round differently.
    if decimals < 0:
        scaled = op.Mul(op.Round(op.Div(x, 10.0**-decimals)), 10.0**-decimals)
    else:
        scaled = op.Div(op.Round(op.Mul(x, 10.0**decimals)), 10.0**decimals)
    return ctx.cast(scaled, ctx.out.dtype)
