"""The logarithm of the gamma function and its derivatives."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction

import mpmath
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.ops.elementwise.unary import Formula, register_table
from ort_dynamo.lowering.recipes.approximation import polynomial
from ort_dynamo.lowering.recipes.promotion import INT_TO_FLOAT, promote
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten

_SINGLE = ir.DataType.FLOAT


@functools.cache
def bernoulli(k: int) -> Fraction:
    """Return the Bernoulli number B(2k)."""
    return Fraction(*mpmath.bernfrac(2 * k))


# -- lgamma ------------------------------------------------------------------------------------------------------


def _lgamma(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    # Abramowitz & Stegun 6.1.17.
    negative = op.Less(x, 0.0)
    value = log_gamma_of_positive(ctx, op.Where(negative, op.Sub(1.0, x), x))
    angle = _angle(ctx, x)
    mirrored = op.Sub(op.Log(op.Div(math.pi, op.Abs(op.Sin(angle)))), value)
    mirrored = op.Where(op.Equal(angle, 0.0), math.inf, mirrored)
    return op.Where(negative, mirrored, value)


def _angle(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """π times the distance to the nearest integer, which is 0 for -inf."""
    op = ctx.op
    finite = op.Max(x, float(torch.finfo(_dtype(x)).min))
    return op.Mul(op.Sub(finite, op.Round(finite)), math.pi)


def _dtype(x: ir.Value) -> torch.dtype:
    return torch.float32 if x.dtype == _SINGLE else torch.float64


@functools.cache
def _near_two(terms: int) -> tuple[float, ...]:
    """lgamma(2 + z) / z in powers of z, highest first: Abramowitz & Stegun 6.1.33 less log(1 + z)."""
    with mpmath.workdps(30):
        series = [1 - mpmath.euler, *((-1) ** k * (mpmath.zeta(k) - 1) / k for k in range(2, terms + 1))]
        return tuple(float(c) for c in reversed(series))


def log_gamma_of_positive(ctx: LoweringContext, a: ir.Value) -> ir.Value:
    """Return the logarithm of Γ(a), a > 0."""
    op = ctx.op
    # float32 reaches its precision with Stirling's series from 2.5 on, float64 from 7.5.
    border, near_terms, far_terms = (2, 13, 6) if a.dtype == _SINGLE else (7, 27, 10)
    far = _stirling(ctx, op.Max(a, border + 0.5), far_terms)
    # Γ(a) from Γ(2 + z), |z| ≤ 1/2: by the factors between them, or divided by them.
    b = op.Min(a, border + 0.5)
    nearest = op.Round(b)
    z = op.Sub(b, nearest)
    near = op.Mul(z, polynomial(op, z, _near_two(near_terms)))
    # Both kinds of factor under one logarithm would round twice near the roots at 1 and 2.
    divisor = op.Mul(op.Where(op.Less(nearest, 1.5), op.Add(z, 1.0), 1.0), op.Where(op.Less(nearest, 0.5), z, 1.0))
    near = op.Sub(near, op.Log(divisor))
    if border > 2:
        factors = [op.Where(op.Greater(nearest, k + 0.5), op.Add(z, float(k)), 1.0) for k in range(2, border)]
        near = op.Add(near, op.Log(functools.reduce(op.Mul, factors)))
    return op.Where(op.Less(a, border + 0.5), near, far)


def _stirling(ctx: LoweringContext, a: ir.Value, terms: int) -> ir.Value:
    """Abramowitz & Stegun 6.1.40, arranged so that infinity stays infinity."""
    op = ctx.op
    series = [float(bernoulli(k) / (2 * k * (2 * k - 1))) for k in range(terms, 0, -1)]
    inverse = op.Reciprocal(a)
    tail = op.Mul(inverse, polynomial(op, op.Mul(inverse, inverse), series))
    main = op.Mul(op.Sub(a, 0.5), op.Sub(op.Log(a), 1.0))
    return op.Add(main, op.Add(tail, 0.5 * math.log(2 * math.pi) - 0.5))


# -- digamma -----------------------------------------------------------------------------------------------------


def _digamma(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    negative = op.Less(x, 0.0)
    value = _digamma_of_positive(ctx, op.Where(negative, op.Sub(1.0, x), x))
    # Abramowitz & Stegun 6.3.7; torch gives nan at the poles.
    angle = _angle(ctx, x)
    tangent = op.Div(op.Sin(angle), op.Sin(op.Sub(math.pi / 2, op.Abs(angle))))
    mirrored = op.Sub(value, op.Div(math.pi, tangent))
    return op.Where(negative, op.Where(op.Equal(angle, 0.0), math.nan, mirrored), value)


def _digamma_of_positive(ctx: LoweringContext, a: ir.Value) -> ir.Value:
    op = ctx.op
    steps, terms = (6, 4) if a.dtype == _SINGLE else (10, 9)
    # Abramowitz & Stegun 6.3.6 and 6.3.18.
    below = [op.Reciprocal(a), *(op.Reciprocal(op.Add(a, float(k))) for k in range(1, steps))]
    high = op.Add(a, float(steps))
    inverse = op.Reciprocal(high)
    square = op.Mul(inverse, inverse)
    series = polynomial(op, square, [float(bernoulli(k) / (2 * k)) for k in range(terms, 0, -1)])
    asymptotic = op.Sub(op.Sub(op.Log(high), op.Mul(inverse, 0.5)), op.Mul(square, series))
    return op.Sub(asymptotic, functools.reduce(op.Add, reversed(below)))


# -- polygamma ---------------------------------------------------------------------------------------------------


@lowering(aten.polygamma.default)
def polygamma(ctx: LoweringContext, n: int, self: ir.Value) -> ir.Value:
    """polygamma(int n, Tensor self) -> Tensor"""
    (x,), _ = promote(ctx, self, kind=INT_TO_FLOAT)
    if n == 0:
        return ctx.cast(_digamma(ctx, x), ctx.out.dtype)
    if n > 20:
        raise ctx.refuse(f"derivative of order {n}: its factorial is near the largest float32")
    op = ctx.op
    # torch mirrors the first derivative below 1/2, the others at 0.
    negative = op.Less(x, 0.5 if n == 1 else 0.0)
    a = op.Where(negative, op.Sub(1.0, x), op.Abs(x))  # Abs, for the pole at -0.0 is the one at 0.0
    sign = (-1.0) ** (n + 1)
    value = op.Mul(_hurwitz_zeta(ctx, n + 1, a), sign * math.factorial(n))
    mirrored = op.Sub(op.Mul(value, -sign), _cotangent_derivative(ctx, n, x))
    return ctx.cast(op.Where(negative, mirrored, value), ctx.out.dtype)


def _hurwitz_zeta(ctx: LoweringContext, s: int, a: ir.Value) -> ir.Value:
    """ζ(s, a) of a > 0 by the formula of Euler and Maclaurin (NIST Handbook of Mathematical Functions, 25.11.28)."""
    op = ctx.op
    steps, terms = (7, 4) if a.dtype == _SINGLE else (10, 11)
    power = ctx.constant(-s, _dtype(a))
    below = [op.Pow(a if k == 0 else op.Add(a, float(k)), power) for k in range(steps)]
    high = op.Add(a, float(steps))
    inverse = op.Reciprocal(high)
    series = [
        float(bernoulli(k) * math.prod(range(s, s + 2 * k - 1)) / math.factorial(2 * k)) for k in range(terms, 0, -1)
    ]
    tail = op.Mul(inverse, polynomial(op, op.Mul(inverse, inverse), series))
    bracket = op.Add(op.Mul(op.Add(tail, 0.5), inverse), 1 / (s - 1))
    rest = op.Mul(op.Pow(high, ctx.constant(1 - s, _dtype(a))), bracket)
    return functools.reduce(op.Add, [rest, *reversed(below)])


def _cotangent_derivative(ctx: LoweringContext, n: int, x: ir.Value) -> ir.Value:
    """π times the n-th derivative of cot(π x), a polynomial in cot(π x) of degree n + 1."""
    op = ctx.op
    if n == 1:
        # torch agrees: rounded, sin(π x) is zero at the pole 0 alone; at other poles the result is large, not infinite.
        sine = op.Sin(op.Mul(x, math.pi))
        return op.Div(-(math.pi**2), op.Mul(sine, sine))
    angle = _angle(ctx, x)
    cotangent = op.Div(op.Sin(op.Sub(math.pi / 2, op.Abs(angle))), op.Sin(angle))
    coefficients: Sequence[int] = (0, 1)  # lowest power first; the derivative of cot is -(1 + cot²)
    for _ in range(n):
        slope = [k * c for k, c in enumerate(coefficients)][1:]
        coefficients = [-a - b for a, b in zip([*slope, 0, 0], [0, 0, *slope], strict=True)]
    return op.Mul(polynomial(op, cotangent, [float(c) for c in reversed(coefficients)]), math.pi ** (n + 1))


_MATHEMATICAL: dict[OpOverload, Formula] = {
    aten.lgamma.default: _lgamma,
    aten.digamma.default: _digamma,
}

register_table(_MATHEMATICAL, INT_TO_FLOAT)
