"""Chebyshev, Hermite, Laguerre and Legendre polynomials whose degrees are data: three-term recurrences in a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.elementwise.trigonometry import acos, cos
from ort_dynamo.lowering.ops.elementwise.unary import truncate
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.ops.memory.views import size_is_zero
from ort_dynamo.lowering.recipes.loops import Carried, repeat_while
from ort_dynamo.lowering.recipes.promotion import INT_TO_FLOAT, promote
from ort_dynamo.lowering.registry import register
from ort_dynamo.torch_internals.kernels.operators import aten

Step = Callable[[OpBuilder, ir.Value, ir.Value, ir.Value, ir.Value], ir.Value]
"""step(op, x, k, p, q): the polynomial of degree k + 1 from those of degree k - 1 (p) and k (q)."""

Closed = Callable[[LoweringContext, ir.Value, ir.Value], ir.Value]
"""closed(ctx, n, angle): the polynomial of degree n at cos(angle)."""


@dataclass(frozen=True)
class _Family:
    """A sequence of polynomials; the first is 1.

    Attributes:
        slope, offset: the second is slope * x + offset.
        step: the recurrence.
        closed: a form for -1 < x < 1, used for degrees above `_CLOSED_FROM` as torch does.
        shifted: the argument is mapped from [0, 1] to [-1, 1].
        limited: torch gives nan for degrees above 128 (float32) or 512 (float64).
    """

    slope: float
    offset: float
    step: Step
    closed: Closed | None = None
    shifted: bool = False
    limited: bool = False


_CLOSED_FROM = 6.0


# Abramowitz & Stegun, table 22.7.


def _chebyshev_step(op: OpBuilder, x: ir.Value, k: ir.Value, p: ir.Value, q: ir.Value) -> ir.Value:
    return op.Sub(op.Mul(op.Add(x, x), q), p)


def _hermite_h_step(op: OpBuilder, x: ir.Value, k: ir.Value, p: ir.Value, q: ir.Value) -> ir.Value:
    return op.Sub(op.Mul(op.Add(x, x), q), op.Mul(op.Add(k, k), p))


def _hermite_he_step(op: OpBuilder, x: ir.Value, k: ir.Value, p: ir.Value, q: ir.Value) -> ir.Value:
    return op.Sub(op.Mul(x, q), op.Mul(k, p))


def _laguerre_step(op: OpBuilder, x: ir.Value, k: ir.Value, p: ir.Value, q: ir.Value) -> ir.Value:
    factor = op.Add(op.Add(k, k), op.Sub(1.0, x))
    return op.Div(op.Sub(op.Mul(factor, q), op.Mul(k, p)), op.Add(k, 1.0))


def _legendre_step(op: OpBuilder, x: ir.Value, k: ir.Value, p: ir.Value, q: ir.Value) -> ir.Value:
    factor = op.Mul(op.Add(op.Add(k, k), 1.0), x)
    return op.Div(op.Sub(op.Mul(factor, q), op.Mul(k, p)), op.Add(k, 1.0))


# NIST Handbook of Mathematical Functions, 18.5.1 to 18.5.4; torch's V and W are named the other way round.


def _closed_t(ctx: LoweringContext, n: ir.Value, angle: ir.Value) -> ir.Value:
    return cos(ctx, ctx.op.Mul(n, angle))


def _closed_u(ctx: LoweringContext, n: ir.Value, angle: ir.Value) -> ir.Value:
    op = ctx.op
    return op.Div(op.Sin(op.Mul(op.Add(n, 1.0), angle)), op.Sin(angle))


def _closed_v(ctx: LoweringContext, n: ir.Value, angle: ir.Value) -> ir.Value:
    op = ctx.op
    return op.Div(cos(ctx, op.Mul(op.Add(n, 0.5), angle)), cos(ctx, op.Mul(angle, 0.5)))


def _closed_w(ctx: LoweringContext, n: ir.Value, angle: ir.Value) -> ir.Value:
    op = ctx.op
    return op.Div(op.Sin(op.Mul(op.Add(n, 0.5), angle)), op.Sin(op.Mul(angle, 0.5)))


def _polynomial(family: _Family, ctx: LoweringContext, x: ir.Value | Number, n: ir.Value | Number) -> ir.Value:
    """special_chebyshev_polynomial_t(Tensor x, Tensor n) -> Tensor"""
    if any(map(size_is_zero, ctx.out.shape)):
        return filled(ctx, 0)  # defect empty_loops
    (t, degree), dtype = promote(ctx, x, n, kind=INT_TO_FLOAT)
    op = ctx.op
    if family.shifted:
        t = op.Sub(op.Add(t, t), 1.0)
    # n that is infinite, nan or negative matches no degree.
    degree = op.Where(op.Less(op.Abs(degree), 2.0**31), truncate(ctx, degree), -1.0)
    limit = 128.0 if dtype == torch.float32 else 512.0
    looped = degree
    if family.limited:
        looped = op.Where(op.Greater(degree, limit), 0.0, looped)
    if family.closed is not None:
        inside = op.And(op.Less(op.Abs(t), 1.0), op.Greater(degree, _CLOSED_FROM))
        looped = op.Where(inside, 0.0, looped)
    result = _recurrence(ctx, family, t, looped, dtype)
    if family.closed is not None:
        result = op.Where(inside, family.closed(ctx, degree, acos(ctx, op.Where(inside, t, 0.0))), result)
    if family.limited:
        result = op.Where(op.Greater(degree, limit), float("nan"), result)
    return ctx.cast(op.Where(op.Less(degree, 0.0), 0.0, result), ctx.out.dtype)


def _recurrence(ctx: LoweringContext, family: _Family, x: ir.Value, degree: ir.Value, dtype: torch.dtype) -> ir.Value:
    """Return the polynomials of `x` of these degrees, 0 and above."""
    one = ctx.op.Expand(ctx.constant(1, dtype), ctx.shape(ctx.out.shape))
    second = ctx.op.Add(ctx.op.Mul(ctx.op.Mul(one, x), family.slope), family.offset)
    result = ctx.op.Where(ctx.op.Less(degree, 0.5), one, second)

    def unfinished(op: OpBuilder, carried: Carried) -> ir.Value:
        k, _, current, _ = carried
        left = op.And(op.Greater(degree, k), op.Not(op.IsNaN(current)))
        return op.Greater(op.ReduceSum(op.Cast(left, to=ir.DataType.INT64), keepdims=0), 0)

    def step(op: OpBuilder, carried: Carried) -> Carried:
        k, before, current, found = carried
        after = family.step(op, x, k, before, current)
        reached = op.Greater(degree, k)
        return [op.Add(k, 1.0), current, after, op.Where(reached, after, found)]

    *_, found = repeat_while(ctx, [ctx.constant(1, dtype), one, second, result], unfinished, step)
    return found


_FAMILIES = {
    "chebyshev_polynomial_t": _Family(1, 0, _chebyshev_step, _closed_t),
    "chebyshev_polynomial_u": _Family(2, 0, _chebyshev_step, _closed_u),
    "chebyshev_polynomial_v": _Family(2, -1, _chebyshev_step, _closed_v),
    "chebyshev_polynomial_w": _Family(2, 1, _chebyshev_step, _closed_w),
    "shifted_chebyshev_polynomial_t": _Family(1, 0, _chebyshev_step, _closed_t, shifted=True),
    "shifted_chebyshev_polynomial_u": _Family(2, 0, _chebyshev_step, _closed_u, shifted=True),
    "shifted_chebyshev_polynomial_v": _Family(2, -1, _chebyshev_step, _closed_v, shifted=True),
    "shifted_chebyshev_polynomial_w": _Family(2, 1, _chebyshev_step, _closed_w, shifted=True),
    "hermite_polynomial_h": _Family(2, 0, _hermite_h_step, limited=True),
    "hermite_polynomial_he": _Family(1, 0, _hermite_he_step, limited=True),
    "laguerre_polynomial_l": _Family(-1, 1, _laguerre_step),
    "legendre_polynomial_p": _Family(1, 0, _legendre_step),
}

for _name, _family in _FAMILIES.items():
    _packet = getattr(aten, f"special_{_name}")
    for _overload in ("default", "x_scalar", "n_scalar"):
        register(getattr(_packet, _overload), functools.partial(_polynomial, _family))
