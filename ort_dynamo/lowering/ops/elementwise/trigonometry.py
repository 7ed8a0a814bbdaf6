"""Circular and hyperbolic functions and their inverses.

ONNX Runtime's CPU kernels of most are for float32 only, and those of some are slow.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.ops.elementwise.unary import Formula, expm1, log1p, register_table, single, square_root
from ort_dynamo.lowering.recipes.approximation import polynomial
from ort_dynamo.lowering.recipes.promotion import INT_TO_FLOAT
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten


def _or_kernel(op_type: str, formula: Formula) -> Formula:
    """Return the operator where the target has a kernel for the dtype, else `formula`."""

    def choice(ctx: LoweringContext, x: ir.Value) -> ir.Value:
        assert x.dtype is not None
        if ctx.target.takes(op_type, "", {"T": x.dtype}):
            result: ir.Value = getattr(ctx.op, op_type)(x)
            return result
        return formula(ctx, x)

    return choice


def _cos_formula(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    # 1 - 2 sin²(x / 2): halving is exact, whereas π/2 - x rounds.
    op = ctx.op
    sine = op.Sin(op.Mul(x, 0.5))
    return op.Sub(1.0, op.Mul(op.Mul(sine, sine), 2.0))


def _unless_walked(op_type: str, formula: Formula) -> Formula:
    """Return the operator, but `formula` where kernels walk over the entries, at 7 to 24 ns each."""
    choice = _or_kernel(op_type, formula)
    return lambda ctx, x: formula(ctx, x) if ctx.target.facts.walks_entries else choice(ctx, x)


cos = _or_kernel("Cos", _cos_formula)


def _tan(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    return ctx.op.Div(ctx.op.Sin(x), cos(ctx, x))


# -- inverse circular functions ------------------------------------------------------------------------------------

_ARCTANGENT = tuple((-1) ** k / (2 * k + 1) for k in range(13))
"""Taylor's series of atan(x) / x in powers of x²; the next term is below 1e-19 up to |x| = tan(π/16)."""


def _atan(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    magnitude = op.Abs(x)
    small = op.Div(op.Min(magnitude, 1.0), op.Max(magnitude, 1.0))
    # tan(v / 2) = tan v / (1 + √(1 + tan² v)), twice: from at most π/4 to at most π/16.
    for _ in range(2):
        small = op.Div(small, op.Add(op.Sqrt(op.Add(op.Mul(small, small), 1.0)), 1.0))
    angle = op.Mul(op.Mul(small, polynomial(op, op.Mul(small, small), reversed(_ARCTANGENT))), 4.0)
    angle = op.Where(op.Greater(magnitude, 1.0), op.Sub(math.pi / 2, angle), angle)
    return op.Mul(op.Sign(x), angle)


atan = _or_kernel("Atan", _atan)


def _asin(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    cosine = op.Sqrt(op.Mul(op.Sub(1.0, x), op.Add(x, 1.0)))
    return op.Mul(atan(ctx, op.Div(x, op.Add(cosine, 1.0))), 2.0)


def _acos(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    return op.Mul(atan(ctx, square_root(ctx, op.Div(op.Sub(1.0, x), op.Add(x, 1.0)))), 2.0)


acos = _or_kernel("Acos", _acos)


# -- hyperbolic functions ------------------------------------------------------------------------------------------


def _halves(ctx: LoweringContext, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """exp|x| / 2 and exp(-|x|) / 2; the first overflows no earlier than sinh and cosh do."""
    op = ctx.op
    root = op.Exp(op.Mul(op.Abs(x), 0.5))
    return op.Mul(op.Mul(root, 0.5), root), op.Div(op.Div(0.5, root), root)


def _sinh(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    large = op.Mul(op.Sign(x), op.Sub(*_halves(ctx, x)))
    growth = expm1(ctx, op.Clip(x, -1.0, 1.0))
    small = op.Mul(op.Add(growth, op.Div(growth, op.Add(growth, 1.0))), 0.5)
    return op.Where(op.Less(op.Abs(x), 1.0), small, large)


def _cosh(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    return ctx.op.Add(*_halves(ctx, x))


# The forms of W. Kahan, "Branch cuts for complex elementary functions" (1987), for real arguments.


def _asinh(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    magnitude = op.Abs(x)
    inverse = op.Reciprocal(magnitude)
    root = square_root(ctx, op.Add(op.Mul(inverse, inverse), 1.0))
    value = log1p(ctx, op.Add(magnitude, op.Div(magnitude, op.Add(inverse, root))))
    return op.Mul(op.Sign(x), value)


def _acosh(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    excess = op.Sub(x, 1.0)
    product = op.Mul(square_root(ctx, excess), square_root(ctx, op.Add(x, 1.0)))
    return log1p(ctx, op.Add(excess, product))


def _atanh(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    op = ctx.op
    magnitude = op.Abs(x)  # near -1 the logarithm's argument would cancel
    value = log1p(ctx, op.Div(op.Add(magnitude, magnitude), op.Sub(1.0, magnitude)))
    return op.Mul(op.Sign(x), op.Mul(value, 0.5))


_MATHEMATICAL: dict[OpOverload, Formula] = {
    aten.sin.default: single("Sin"),
    aten.cos.default: cos,
    aten.tan.default: _unless_walked("Tan", _tan),
    aten.asin.default: _or_kernel("Asin", _asin),
    aten.acos.default: acos,
    aten.atan.default: atan,
    aten.sinh.default: _unless_walked("Sinh", _sinh),
    aten.cosh.default: _unless_walked("Cosh", _cosh),
    aten.asinh.default: _unless_walked("Asinh", _asinh),
    aten.acosh.default: _unless_walked("Acosh", _acosh),
    aten.atanh.default: _unless_walked("Atanh", _atanh),
}
"""Integers are computed in the default floating-point dtype."""

register_table(_MATHEMATICAL, INT_TO_FLOAT)
