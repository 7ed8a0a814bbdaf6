"""Airy's function."""

from __future__ import annotations

import functools
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
_BORDER = 2.25  # between the polynomial and the functions fitted to the asymptotic expansions
_PHASE = 2 / 3 * _BORDER**1.5


def _near(y: Any) -> Any:
    return mpmath.airyai(_BORDER * y)


def _decay(y: Any) -> Any:
    """2 √π x^(1/4) exp(ζ) Ai(x) of _PHASE / ζ = (y + 1) / 2, ζ = 2/3 x^(3/2) (Abramowitz & Stegun 10.4.59)."""
    zeta = 2 * _PHASE / (y + 1)
    x = mpmath.cbrt((1.5 * zeta) ** 2)
    return 2 * mpmath.sqrt(mpmath.pi) * mpmath.root(x, 4) * mpmath.exp(zeta) * mpmath.airyai(x)


def _wave(odd: int, y: Any) -> Any:
    """P (odd = 0) or ζ Q (odd = 1) of (_PHASE / ζ)² = (y + 1) / 2 (Abramowitz & Stegun 10.4.60 and 10.4.64).

    √π x^(1/4) Ai(-x) is P sin θ - Q cos θ, that of Bi is P cos θ + Q sin θ, θ = ζ + π/4.
    """
    zeta = _PHASE / mpmath.sqrt((y + 1) / 2)
    x = mpmath.cbrt((1.5 * zeta) ** 2)
    scale = mpmath.sqrt(mpmath.pi) * mpmath.root(x, 4)
    sine, cosine = mpmath.sin(zeta + mpmath.pi / 4), mpmath.cos(zeta + mpmath.pi / 4)
    ai, bi = scale * mpmath.airyai(-x), scale * mpmath.airybi(-x)
    return zeta * (sine * bi - cosine * ai) if odd else sine * ai + cosine * bi


# `fit` knows a function by its identity, so each is made once.
_P, _Q = (functools.partial(_wave, odd) for odd in (0, 1))


def _airy_ai(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    if x.dtype != _SINGLE:
        # It is off by 3e-6 between -5 and -2.
        raise ctx.refuse("torch's float64 result is precise only to float32, so another implementation would differ")
    op = ctx.op
    magnitude = op.Max(op.Abs(x), _BORDER)
    root = op.Sqrt(magnitude)
    zeta = op.Mul(op.Mul(magnitude, root), 2 / 3)
    inverse = op.Div(_PHASE, zeta)
    scale = op.Mul(op.Sqrt(root), math.sqrt(math.pi))
    near = polynomial(op, op.Clip(op.Mul(x, 1 / _BORDER), -1.0, 1.0), fit(_near, 14))
    decay = polynomial(op, op.Sub(op.Add(inverse, inverse), 1.0), fit(_decay, 9))
    right = op.Div(op.Mul(op.Mul(decay, op.Exp(op.Neg(zeta))), 0.5), scale)
    square = op.Sub(op.Mul(op.Mul(inverse, inverse), 2.0), 1.0)
    p = polynomial(op, square, fit(_P, 8))
    q = op.Mul(polynomial(op, square, fit(_Q, 8)), op.Mul(inverse, 1 / _PHASE))
    # The phase rounds where eager's does.
    theta = op.Add(zeta, math.pi / 4)
    left = op.Div(op.Sub(op.Mul(op.Sin(theta), p), op.Mul(op.Cos(theta), q)), scale)
    value = op.Where(op.Less(x, 0.0), left, right)
    value = op.Where(op.Less(op.Abs(x), _BORDER), near, value)
    return op.Where(op.Or(op.IsInf(x), op.IsNaN(x)), math.nan, value)


_MATHEMATICAL: dict[OpOverload, Formula] = {aten.special_airy_ai.default: _airy_ai}

register_table(_MATHEMATICAL, INT_TO_FLOAT)
