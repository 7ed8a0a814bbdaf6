"""The error function, its relatives and their inverses."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.ops.elementwise.unary import Formula, register_table
from ort_dynamo.lowering.recipes.approximation import fit, polynomial
from ort_dynamo.lowering.recipes.promotion import INT_TO_FLOAT
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten

_SINGLE = ir.DataType.FLOAT
_STRETCH = 4.0  # of those tried, the one whose fit needs the fewest terms


# -- erfcx, from which the others come ---------------------------------------------------------------------------


def _fitted_erfcx(y: Any) -> Any:
    """exp(a²) erfc(a) / t of t = (y + 1) / 2 = 1 / (1 + a / _STRETCH), which takes [0, ∞] to [0, 1].

    The map of "Numerical Recipes", 3rd edition, section 6.2.2.
    """
    t = (y + 1) / 2
    a = _STRETCH * (1 / t - 1)
    return mpmath.exp(a * a) * mpmath.erfc(a) / t


def scaled_complement(ctx: LoweringContext, a: ir.Value) -> ir.Value:
    """exp(a²) erfc(a) of a ≥ 0."""
    op = ctx.op
    t = op.Reciprocal(op.Add(op.Mul(a, 1 / _STRETCH), 1.0))
    terms = 12 if a.dtype == _SINGLE else 23
    return op.Mul(t, polynomial(op, op.Sub(op.Add(t, t), 1.0), fit(_fitted_erfcx, terms)))


def _erfcx(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    right = scaled_complement(ctx, op.Abs(x))
    left = op.Sub(op.Mul(op.Exp(op.Mul(x, x)), 2.0), right)
    return op.Where(op.Less(x, 0.0), left, right)


def erfc(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """1 - erf(x)."""
    # 1 - erf(x) would lose every digit of the tail.
    op = ctx.op
    tail = op.Mul(op.Exp(op.Neg(op.Mul(x, x))), scaled_complement(ctx, op.Abs(x)))
    return op.Where(op.Less(x, 0.0), op.Sub(2.0, tail), tail)


# -- erf ---------------------------------------------------------------------------------------------------------

_TAYLOR = tuple(2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(19))
"""Taylor coefficients of erf(x) / x in powers of x²; the next term is below 1e-18 up to |x| = 1."""


def erf(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Return the error function."""
    op = ctx.op
    if x.dtype == _SINGLE:
        value = op.Erf(x)
        # The clamp is 0 or nan.
        return op.Add(value, op.Clip(x, 0.0, 0.0)) if ctx.target.has_defect("erf_of_nan") else value
    square = op.Mul(x, x)
    near = op.Mul(x, polynomial(op, op.Min(square, 1.0), reversed(_TAYLOR)))
    tail = op.Mul(op.Exp(op.Neg(square)), scaled_complement(ctx, op.Abs(x)))
    far = op.Mul(op.Sign(x), op.Sub(1.0, tail))
    return op.Where(op.Less(square, 1.0), near, far)


# -- inverses ----------------------------------------------------------------------------------------------------

# Giles, "Approximating the erfinv function", GPU Computing Gems (2011), table 5: the polynomials in w - 2.5 for w < 5
# and in √w - 3 beyond, w = -log(1 - x²).
_GILES_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_GILES_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def erfinv(ctx: LoweringContext, y: ir.Value) -> ir.Value:
    """Return the inverse of the error function."""
    op = ctx.op
    x = _erfinv_by_polynomials(ctx, y) if y.dtype == _SINGLE else _erfinv_in_double(ctx, y)
    return op.Where(op.Equal(op.Abs(y), 1.0), op.Mul(y, math.inf), x)


def _erfinv_by_polynomials(ctx: LoweringContext, y: ir.Value) -> ir.Value:
    """Return the inverse of the error function with an error near 1e-6, for |y| up to the last float32 below 1."""
    op = ctx.op
    w = op.Neg(op.Log(op.Mul(op.Sub(1.0, y), op.Add(y, 1.0))))
    near = polynomial(op, op.Sub(w, 2.5), _GILES_NEAR)
    # Below 5 the root is not used, and 0 keeps it real. Above, w ends with the last float below 1.
    far = polynomial(op, op.Sub(op.Sqrt(op.Clip(w, 0.0, 40.0)), 3.0), _GILES_FAR)
    return op.Mul(y, op.Where(op.Less(w, 5.0), near, far))


def _erfinv_in_double(ctx: LoweringContext, y: ir.Value) -> ir.Value:
    """Return the inverse of the error function in float64: by the normal distribution's from |y| = 0.9 on."""
    op = ctx.op
    size = op.Abs(y)
    tail = op.Mul(_normal_tail(ctx, op.Mul(op.Sub(1.0, size), 0.5)), -math.sqrt(0.5))
    return op.Where(op.Less(size, 0.9), _halley(ctx, _erfinv_by_polynomials(ctx, y), y), op.Mul(op.Sign(y), tail))


def _halley(ctx: LoweringContext, x: ir.Value, y: ir.Value) -> ir.Value:
    """x one step of Halley's method nearer to the root of erf(x) = y; the error is cubed, and 1e-6 before."""
    op = ctx.op
    excess = op.Where(
        op.Less(op.Abs(y), 0.5),
        op.Sub(erf(ctx, x), y),
        op.Mul(op.Sign(y), op.Sub(op.Sub(1.0, op.Abs(y)), erfc(ctx, op.Abs(x)))),
    )
    newton = op.Mul(op.Mul(excess, 0.5 * math.sqrt(math.pi)), op.Exp(op.Mul(x, x)))
    return op.Sub(x, op.Div(newton, op.Add(op.Mul(newton, x), 1.0)))


def _ndtri(ctx: LoweringContext, p: ir.Value) -> ir.Value:
    """Return the inverse of the standard normal distribution: √2 erfinv(2 p - 1) but for the tails."""
    op = ctx.op
    low = op.Min(p, op.Sub(1.0, p))
    side = op.Sign(op.Sub(0.5, p))
    tail = op.Mul(_normal_tail(ctx, low), side)
    center = op.Mul(erfinv(ctx, op.Sub(op.Add(p, p), 1.0)), math.sqrt(2))
    return op.Where(op.Equal(low, 0.0), op.Mul(side, -math.inf), op.Where(op.Less(low, 0.05), tail, center))


def _normal_tail(ctx: LoweringContext, p: ir.Value) -> ir.Value:
    """x < 0 with Φ(x) = p, for p ≤ 0.05."""
    op = ctx.op
    log_p = op.Log(p)
    t = op.Sqrt(op.Max(op.Mul(log_p, -2.0), 0.0))
    # Abramowitz & Stegun 26.2.23: off by 4.5e-4 at most.
    quotient = op.Div(
        polynomial(op, t, (0.010328, 0.802853, 2.515517)),
        polynomial(op, t, (0.001308, 0.189269, 1.432788, 1.0)),
    )
    x = op.Sub(t, quotient)
    for _ in range(1 if p.dtype == _SINGLE else 2):
        # Newton's step for log Φ(-x), which is log(erfcx(x / √2) / 2) - x² / 2, and falls by √(2/π) / erfcx(x / √2).
        scaled = scaled_complement(ctx, op.Mul(x, math.sqrt(0.5)))
        log_tail = op.Sub(op.Log(op.Mul(scaled, 0.5)), op.Mul(op.Mul(x, x), 0.5))
        x = op.Add(x, op.Mul(op.Sub(log_tail, log_p), op.Mul(scaled, math.sqrt(math.pi / 2))))
    return op.Neg(x)


_MATHEMATICAL: dict[OpOverload, Formula] = {
    aten.erf.default: erf,
    aten.erfc.default: erfc,
    aten.special_erfcx.default: _erfcx,
    aten.erfinv.default: erfinv,
    aten.special_ndtri.default: _ndtri,
}

register_table(_MATHEMATICAL, INT_TO_FLOAT)
