"""Modified Bessel functions of the first kind."""

from __future__ import annotations

import functools
from typing import Any

import mpmath
import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.ops.elementwise.unary import Formula, register_table, square_root
from ort_dynamo.lowering.recipes.approximation import fit, polynomial
from ort_dynamo.lowering.recipes.promotion import INT_TO_FLOAT
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten

_BORDER = 8.0  # between the two fits


def _near(order: int, y: Any) -> Any:
    """exp(-x) I(x) / x^order of x = 4 (y + 1), in [0, 8]."""
    x = _BORDER * (y + 1) / 2
    return mpmath.exp(-x) * mpmath.besseli(order, x) / x**order


def _far(order: int, y: Any) -> Any:
    """exp(-x) √x I(x) of 8 / x = (y + 1) / 2, so x in [8, ∞]."""
    x = 2 * _BORDER / (y + 1)
    return mpmath.exp(-x) * mpmath.sqrt(x) * mpmath.besseli(order, x)


_NEAR = [functools.partial(_near, order) for order in (0, 1)]  # `fit` remembers a function by its identity
_FAR = [functools.partial(_far, order) for order in (0, 1)]


def _scaled(ctx: LoweringContext, x: ir.Value, order: int) -> ir.Value:
    """exp(-|x|) I(|x|)"""
    op = ctx.op
    single = x.dtype == ir.DataType.FLOAT
    a = op.Abs(x)
    near = polynomial(op, op.Sub(op.Mul(op.Min(a, _BORDER), 2 / _BORDER), 1.0), fit(_NEAR[order], 18 if single else 29))
    if order == 1:
        near = op.Mul(near, a)
    high = op.Max(a, _BORDER)
    far = polynomial(op, op.Sub(op.Div(2 * _BORDER, high), 1.0), fit(_FAR[order], 7 if single else 24))
    return op.Where(op.Less(a, _BORDER), near, op.Div(far, square_root(ctx, high)))


def _bessel(order: int, scaled: bool) -> Formula:
    def formula(ctx: LoweringContext, x: ir.Value) -> ir.Value:
        op = ctx.op
        value = _scaled(ctx, x, order)
        if not scaled:
            # In two factors: exp(x) alone overflows before exp(x) / √x does.
            half = op.Exp(op.Mul(op.Abs(x), 0.5))
            value = op.Mul(op.Mul(value, half), half)
        return op.Mul(value, op.Sign(x)) if order == 1 else value

    return formula


_MATHEMATICAL: dict[OpOverload, Formula] = {
    aten.i0.default: _bessel(0, scaled=False),
    aten.special_i0e.default: _bessel(0, scaled=True),
    aten.special_i1.default: _bessel(1, scaled=False),
    aten.special_i1e.default: _bessel(1, scaled=True),
    aten.special_modified_bessel_i0.default: _bessel(0, scaled=False),
    aten.special_modified_bessel_i1.default: _bessel(1, scaled=False),
}

register_table(_MATHEMATICAL, INT_TO_FLOAT)
