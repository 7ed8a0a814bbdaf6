"""The regularized incomplete gamma functions."""

from __future__ import annotations

import functools
import math
from typing import Any

import mpmath
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.elementwise.unary import log1p
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.ops.special.error_function import erfc
from ort_dynamo.lowering.ops.special.gamma import bernoulli, log_gamma_of_positive
from ort_dynamo.lowering.recipes.approximation import fit, polynomial
from ort_dynamo.lowering.recipes.loops import Carried, any_of, repeat_while
from ort_dynamo.lowering.recipes.promotion import float_dtype, promote
from ort_dynamo.lowering.registry import register
from ort_dynamo.torch_internals.kernels.operators import aten

_LARGE = 1e4
"""From here on the uniform expansion is exact to 1e-13, and the others would take a thousand steps."""


def _precision(ctx: LoweringContext) -> float:
    """Give the relative change from which on further steps do not show in the result: a hundred of them may follow."""
    return max(torch.finfo(float_dtype(ctx.out.dtype)).eps / 1024, torch.finfo(torch.float64).eps / 2)


def _incomplete_gamma(upper: bool, ctx: LoweringContext, self: ir.Value, other: ir.Value) -> ir.Value:
    """igamma(Tensor self, Tensor other) -> Tensor"""
    if is_empty(ctx.out.shape):
        return filled(ctx, 0)
    op = ctx.op
    # float64 throughout: in float32 the powers below would cost two or three digits.
    (a, x), _ = promote(ctx, self, other)
    a, x = (op.Expand(ctx.cast(value, torch.float64), ctx.shape(ctx.out.shape)) for value in (a, x))
    inner = op.And(_is_positive_and_finite(op, a), _is_positive_and_finite(op, x))
    value = _inside(ctx, op.Where(inner, a, 1.0), op.Where(inner, x, 1.0), upper)
    # Everything is below x where a is 0 or x infinite, and nothing where x is 0 or a infinite.
    below = op.Or(op.Equal(a, 0.0), op.Equal(x, math.inf))
    value = op.Where(inner, value, op.Cast(op.Not(below) if upper else below, to=ir.DataType.DOUBLE))
    real = op.And(op.GreaterOrEqual(a, 0.0), op.GreaterOrEqual(x, 0.0))
    undecided = op.And(op.Not(inner), op.Equal(a, x))  # 0 and 0, or two infinities
    return ctx.cast(op.Where(op.And(real, op.Not(undecided)), value, math.nan), ctx.out.dtype)


def _is_positive_and_finite(op: OpBuilder, value: ir.Value) -> ir.Value:
    return op.And(op.Greater(value, 0.0), op.Less(value, math.inf))


def _inside(ctx: LoweringContext, a: ir.Value, x: ir.Value, upper: bool) -> ir.Value:
    """Compute the lower or upper function of positive, finite values; each entry uses one of three formulas."""
    op = ctx.op
    large = op.GreaterOrEqual(a, _LARGE)
    left = op.Less(x, op.Add(a, 1.0))
    by_series = op.And(left, op.Not(large))
    by_fraction = op.Not(op.Or(left, large))
    exponent = _exponent(ctx, a, x)
    density = op.Mul(op.Exp(op.Mul(a, exponent)), _peak(ctx, a))
    lower = op.Mul(density, _series(ctx, a, x, by_series))
    rest = op.Mul(op.Mul(density, a), _continued_fraction(ctx, a, x, by_fraction))
    if upper:
        near = op.Where(left, op.Sub(1.0, lower), rest)
    else:
        near = op.Where(left, lower, op.Sub(1.0, rest))
    return op.Where(large, _uniform(ctx, op.Max(a, _LARGE), op.Sub(x, a), exponent, upper), near)


# -- x^a e^-x / Γ(a + 1) -----------------------------------------------------------------------------------------


def _exponent(ctx: LoweringContext, a: ir.Value, x: ir.Value) -> ir.Value:
    """log(x / a) - (x - a) / a, which is negative but for x = a, without cancellation beside that."""
    op = ctx.op
    distance = op.Div(op.Sub(x, a), a)
    near = op.Less(op.Abs(distance), 0.5)
    logarithm = op.Where(near, log1p(ctx, op.Clip(distance, -0.5, 0.5)), op.Log(op.Div(x, a)))
    return op.Min(op.Sub(logarithm, distance), 0.0)


def _peak(ctx: LoweringContext, a: ir.Value) -> ir.Value:
    """a^a e^-a / Γ(a + 1)."""
    op = ctx.op
    border = 10.0
    low, high = op.Min(a, border), op.Max(a, border)
    logarithm = op.Sub(op.Mul(low, op.Sub(op.Log(low), 1.0)), log_gamma_of_positive(ctx, op.Add(low, 1.0)))
    # Abramowitz & Stegun 6.1.41.
    inverse = op.Reciprocal(high)
    series = [float(bernoulli(k) / (2 * k * (2 * k - 1))) for k in range(10, 0, -1)]
    correction = op.Mul(inverse, polynomial(op, op.Mul(inverse, inverse), series))
    far = op.Div(op.Exp(op.Neg(correction)), op.Sqrt(op.Mul(high, 2 * math.pi)))
    return op.Where(op.Less(a, border), op.Exp(logarithm), far)


# -- the three forms ---------------------------------------------------------------------------------------------


def _series(ctx: LoweringContext, a: ir.Value, x: ir.Value, wanted: ir.Value) -> ir.Value:
    """1 + x / (a + 1) + x² / ((a + 1) (a + 2)) + … where `wanted`: Abramowitz & Stegun 6.5.29."""
    precision = _precision(ctx)

    def proceed(op: OpBuilder, carried: Carried) -> ir.Value:
        term, total, _ = carried
        return any_of(op, op.Greater(term, op.Mul(total, precision)))

    def step(op: OpBuilder, carried: Carried) -> Carried:
        term, total, divisor = carried
        divisor = op.Add(divisor, 1.0)
        term = op.Mul(term, op.Div(x, divisor))
        return [term, op.Add(total, term), divisor]

    first = ctx.op.Cast(wanted, to=ir.DataType.DOUBLE)
    return repeat_while(ctx, (first, first, a), proceed, step)[1]


def _continued_fraction(ctx: LoweringContext, a: ir.Value, x: ir.Value, wanted: ir.Value) -> ir.Value:
    """1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - 2 (2 - a) / …)) where `wanted`: Abramowitz & Stegun 6.5.31.

    By the method of Lentz, as in "Numerical Recipes", 3rd edition, section 5.2.
    """
    op, precision = ctx.op, 4 * _precision(ctx)
    x = op.Where(wanted, x, op.Add(a, 1.0))

    def proceed(op: OpBuilder, carried: Carried) -> ir.Value:
        change = carried[-1]
        return any_of(op, op.And(wanted, op.Greater(op.Abs(op.Sub(change, 1.0)), precision)))

    def step(op: OpBuilder, carried: Carried) -> Carried:
        index, below, c, d, value, _ = carried
        index = op.Add(index, 1.0)
        numerator = op.Mul(index, op.Sub(a, index))
        below = op.Add(below, 2.0)
        d = op.Reciprocal(op.Add(op.Mul(numerator, d), below))
        c = op.Add(below, op.Div(numerator, c))
        change = op.Mul(c, d)
        return [index, below, c, d, op.Mul(value, change), change]

    below = op.Add(op.Sub(x, a), 1.0)
    inverse = op.Reciprocal(below)
    infinite = op.Add(op.Mul(x, 0.0), 1e300)
    start = (ctx.constant(0.0, torch.float64), below, infinite, inverse, inverse, infinite)
    return repeat_while(ctx, start, proceed, step)[4]


_WIDTH = 0.1
"""Up to this |η| the correction of the uniform expansion counts: beyond, exp(-_LARGE η² / 2) is below 1e-21."""


def _correction(order: int, y: Any) -> Any:
    """c0 or c1 of the uniform expansion at η = _WIDTH y (NIST Handbook, 8.12.9 and 8.12.11)."""
    eta = _WIDTH * y
    # μ - log(1 + μ) = η² / 2, solved by Lambert's function.
    mu = mpmath.re(-mpmath.lambertw(-mpmath.exp(-1 - eta * eta / 2), -1 if eta > 0 else 0)) - 1
    if order == 0:
        return 1 / mu - 1 / eta
    return 1 / eta**3 - 1 / mu**3 - 1 / mu**2 - 1 / (12 * mu)


_CORRECTIONS = [functools.partial(_correction, order) for order in (0, 1)]


def _uniform(ctx: LoweringContext, a: ir.Value, excess: ir.Value, exponent: ir.Value, upper: bool) -> ir.Value:
    """Give the uniform asymptotic expansion for large a (NIST Handbook of Mathematical Functions, 8.12.3, 8.12.4)."""
    op = ctx.op
    eta = op.Mul(op.Sign(excess), op.Sqrt(op.Mul(exponent, -2.0)))
    y = op.Clip(op.Mul(eta, 1 / _WIDTH), -1.0, 1.0)
    first, second = (polynomial(op, y, fit(correction, 8)) for correction in _CORRECTIONS)
    density = op.Div(op.Exp(op.Mul(a, exponent)), op.Sqrt(op.Mul(a, 2 * math.pi)))
    rest = op.Mul(density, op.Add(first, op.Div(second, a)))
    spread = op.Mul(eta, op.Sqrt(op.Mul(a, 0.5)))
    if upper:
        return op.Add(op.Mul(erfc(ctx, spread), 0.5), rest)
    return op.Sub(op.Mul(erfc(ctx, op.Neg(spread)), 0.5), rest)


register(aten.igamma.default, functools.partial(_incomplete_gamma, False))
register(aten.igammac.default, functools.partial(_incomplete_gamma, True))
