"""Bessel functions of the first and second kind, and modified ones of the second kind, of orders 0 and 1."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.ops.elementwise.unary import Formula, register_table, square_root
from ort_dynamo.lowering.recipes.approximation import fit, polynomial
from ort_dynamo.lowering.recipes.promotion import INT_TO_FLOAT
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten

_SINGLE = ir.DataType.FLOAT
_BORDER = 8.0  # between power series and phase, of J and Y
_K_BORDER = 2.0  # the same of K


def _of_square(border: float, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Evaluate the even `function` at x = border √((y + 1) / 2)."""
    return lambda y: function(border * mpmath.sqrt((y + 1) / 2))


def _j_over_power(order: int, x: Any) -> Any:
    return mpmath.besselj(order, x) / x**order


def _regular_y(order: int, x: Any) -> Any:
    """Y(x) without its logarithm and pole, over x for order 1 (Abramowitz & Stegun 9.1.11)."""
    singular = 2 / mpmath.pi * (mpmath.log(x) * mpmath.besselj(order, x) - order / x)
    return (mpmath.bessely(order, x) - singular) / x**order


def _regular_k(order: int, x: Any) -> Any:
    """Return the same of K(x) (Abramowitz & Stegun 9.6.11)."""
    singular = (2 * order - 1) * mpmath.log(x) * mpmath.besseli(order, x) + (1 / x if order else 0)
    return (mpmath.besselk(order, x) - singular) / x**order


# `fit` knows a function by its identity, so each is made once.
_J = [_of_square(_BORDER, functools.partial(_j_over_power, n)) for n in (0, 1)]
_Y = [_of_square(_BORDER, functools.partial(_regular_y, n)) for n in (0, 1)]
_K = [_of_square(_K_BORDER, functools.partial(_regular_k, n)) for n in (0, 1)]


def _hankel(order: int, odd: int, y: Any) -> Any:
    """P (odd = 0) or x Q (odd = 1) of Abramowitz & Stegun 9.2.5, by 64 / x² = (y + 1) / 2."""
    x = _BORDER / mpmath.sqrt((y + 1) / 2)
    phase = x - mpmath.pi * (2 * order + 1) / 4
    j, y_ = mpmath.besselj(order, x), mpmath.bessely(order, x)
    root = mpmath.sqrt(mpmath.pi * x / 2)
    if odd:
        return x * root * (y_ * mpmath.cos(phase) - j * mpmath.sin(phase))
    return root * (j * mpmath.cos(phase) + y_ * mpmath.sin(phase))


def _scaled_far_k(order: int, y: Any) -> Any:
    """exp(x) √x K(x) of 2 / x = (y + 1) / 2."""
    x = 2 * _K_BORDER / (y + 1)
    return mpmath.exp(x) * mpmath.sqrt(x) * mpmath.besselk(order, x)


_P = [functools.partial(_hankel, order, 0) for order in (0, 1)]
_Q = [functools.partial(_hankel, order, 1) for order in (0, 1)]
_FAR_K = [functools.partial(_scaled_far_k, order) for order in (0, 1)]


def _fitted_square(ctx: LoweringContext, x: ir.Value, border: float, function: Any, terms: int) -> ir.Value:
    """Return a function fitted over [0, border] by x²."""
    op = ctx.op
    return polynomial(op, op.Sub(op.Mul(op.Mul(x, x), 2 / border**2), 1.0), fit(function, terms))


def _check_single(ctx: LoweringContext, x: ir.Value) -> None:
    if x.dtype != _SINGLE:
        # It is off by 3e-7 around x = 5, where its rational approximations meet.
        raise ctx.refuse("torch's float64 result is precise only to float32, so another implementation would differ")


def _near_j(ctx: LoweringContext, x: ir.Value, order: int) -> ir.Value:
    value = _fitted_square(ctx, x, _BORDER, _J[order], 12)
    return ctx.op.Mul(value, x) if order else value


def _far(ctx: LoweringContext, x: ir.Value, order: int, second_kind: bool) -> ir.Value:
    """√(2 / (π x)) (P cos φ - Q sin φ), or of the second kind P sin φ + Q cos φ; φ = x - π/4, for order 1 - 3π/4."""
    op = ctx.op
    sine, cosine = op.Sin(x), op.Cos(x)
    # cos φ and sin φ times √2 by the addition theorem: x - π/4 would round.
    even, odd = op.Add(cosine, sine), op.Sub(sine, cosine)
    if order == 0:
        cos_phase, sin_phase = even, odd
    else:
        cos_phase, sin_phase = odd, op.Neg(even)
    inverse = op.Reciprocal(x)
    y = op.Sub(op.Mul(op.Mul(inverse, inverse), 2 * _BORDER**2), 1.0)
    p = polynomial(op, y, fit(_P[order], 6))
    q = op.Mul(inverse, polynomial(op, y, fit(_Q[order], 6)))
    if second_kind:
        wave = op.Add(op.Mul(p, sin_phase), op.Mul(q, cos_phase))
    else:
        wave = op.Sub(op.Mul(p, cos_phase), op.Mul(q, sin_phase))
    return op.Div(op.Mul(wave, 1 / math.sqrt(math.pi)), square_root(ctx, x))


def _bessel_j(order: int) -> Formula:
    def formula(ctx: LoweringContext, x: ir.Value) -> ir.Value:
        _check_single(ctx, x)
        op = ctx.op
        a = op.Abs(x)
        near, far = _near_j(ctx, op.Min(a, _BORDER), order), _far(ctx, op.Max(a, _BORDER), order, second_kind=False)
        value = op.Where(op.Less(a, _BORDER), near, far)
        return op.Mul(value, op.Sign(x)) if order else value

    return formula


def _bessel_y(order: int) -> Formula:
    def formula(ctx: LoweringContext, x: ir.Value) -> ir.Value:
        _check_single(ctx, x)
        op = ctx.op
        low, high = op.Min(x, _BORDER), op.Max(x, _BORDER)
        regular = _fitted_square(ctx, low, _BORDER, _Y[order], 13)
        logarithm = op.Mul(op.Log(low), _near_j(ctx, low, order))
        if order:
            regular = op.Mul(regular, low)
            logarithm = op.Sub(op.Where(op.Equal(low, 0.0), 0.0, logarithm), op.Reciprocal(op.Abs(low)))
        near = op.Add(op.Mul(logarithm, 2 / math.pi), regular)
        return op.Where(op.Less(x, _BORDER), near, _far(ctx, high, order, second_kind=True))

    return formula


def _bessel_k(order: int, scaled: bool) -> Formula:
    def formula(ctx: LoweringContext, x: ir.Value) -> ir.Value:
        op = ctx.op
        low, high = op.Min(x, _K_BORDER), op.Max(x, _K_BORDER)
        regular = _fitted_square(ctx, low, _K_BORDER, _K[order], 6 if x.dtype == _SINGLE else 12)
        logarithm = op.Mul(op.Log(low), _taylor_i(ctx, low, order))
        if order:
            logarithm = op.Where(op.Equal(low, 0.0), 0.0, logarithm)
            near = op.Add(op.Add(op.Reciprocal(op.Abs(low)), logarithm), op.Mul(regular, low))
        else:
            near = op.Sub(regular, logarithm)
        terms = 11 if x.dtype == _SINGLE else 26
        y = op.Sub(op.Div(2 * _K_BORDER, high), 1.0)
        far = op.Div(polynomial(op, y, fit(_FAR_K[order], terms)), square_root(ctx, high))
        if scaled:
            near = op.Mul(near, op.Exp(low))
        else:
            far = op.Mul(far, op.Exp(op.Neg(high)))
        return op.Where(op.Less(x, _K_BORDER), near, far)

    return formula


def _taylor_i(ctx: LoweringContext, x: ir.Value, order: int) -> ir.Value:
    """I(x) for |x| ≤ 2 (Abramowitz & Stegun 9.6.10)."""
    terms = 8 if x.dtype == _SINGLE else 14
    series = [1 / (math.factorial(k) * math.factorial(k + order)) for k in range(terms - 1, -1, -1)]
    half = ctx.op.Mul(x, 0.5)
    value = polynomial(ctx.op, ctx.op.Mul(half, half), series)
    return ctx.op.Mul(value, half) if order else value


def _spherical_j0(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """sin(x) / x, which needs no series: the quotient is exact to an ulp beside 0."""
    op = ctx.op
    finite = op.Where(op.IsInf(x), 1.0, x)
    value = op.Where(op.IsInf(x), 0.0, op.Div(op.Sin(finite), finite))
    return op.Where(op.Equal(x, 0.0), 1.0, value)


_MATHEMATICAL: dict[OpOverload, Formula] = {
    aten.special_bessel_j0.default: _bessel_j(0),
    aten.special_bessel_j1.default: _bessel_j(1),
    aten.special_bessel_y0.default: _bessel_y(0),
    aten.special_bessel_y1.default: _bessel_y(1),
    aten.special_modified_bessel_k0.default: _bessel_k(0, scaled=False),
    aten.special_modified_bessel_k1.default: _bessel_k(1, scaled=False),
    aten.special_scaled_modified_bessel_k0.default: _bessel_k(0, scaled=True),
    aten.special_scaled_modified_bessel_k1.default: _bessel_k(1, scaled=True),
    aten.special_spherical_bessel_j0.default: _spherical_j0,
}

register_table(_MATHEMATICAL, INT_TO_FLOAT)
