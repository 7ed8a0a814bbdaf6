"""The zeta function of Hurwitz, of two tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.ops.special.gamma import bernoulli
from ort_dynamo.lowering.recipes.loops import Carried, any_of, repeat_while
from ort_dynamo.lowering.recipes.promotion import INT_TO_FLOAT, promote
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten

_STEPS, _TERMS = 10, 11


@lowering(aten.special_zeta.default)
def special_zeta(ctx: LoweringContext, self: ir.Value, other: ir.Value) -> ir.Value:
    """special_zeta(Tensor self, Tensor other) -> Tensor"""
    if is_empty(ctx.out.shape):
        return filled(ctx, 0)
    op = ctx.op
    # float64, as in torch: a power of a rounded base is off by the exponent times the rounding.
    (s, q), _ = promote(ctx, self, other, kind=INT_TO_FLOAT)
    s, q = ctx.cast(s, torch.float64), ctx.cast(q, torch.float64)
    pole = op.And(op.LessOrEqual(q, 0.0), op.Equal(q, op.Floor(q)))
    complex_ = op.And(op.Less(q, 0.0), op.Not(op.Equal(s, op.Floor(s))))
    valid = op.And(op.Greater(s, 1.0), op.Not(op.Or(pole, complex_)))
    value = _zeta(ctx, op.Where(valid, s, 2.0), op.Where(valid, q, 1.0))
    value = op.Where(op.Or(complex_, op.Or(op.IsNaN(s), op.IsNaN(q))), math.nan, value)
    value = op.Where(op.Or(pole, op.Equal(s, 1.0)), math.inf, value)
    return ctx.cast(op.Where(op.Less(s, 1.0), math.nan, value), ctx.out.dtype)


def _zeta(ctx: LoweringContext, s: ir.Value, q: ir.Value) -> ir.Value:
    """Σ (q + k)^-s by the formula of Euler and Maclaurin (NIST Handbook of Mathematical Functions, 25.11.28)."""
    op = ctx.op
    shape = ctx.shape(ctx.out.shape)
    power = op.Neg(s)
    total, a = _terms_of_negative(ctx, power, op.Expand(q, shape))
    powers = [op.Pow(a if k == 0 else op.Add(a, float(k)), power) for k in range(_STEPS + 1)]
    total = functools.reduce(op.Add, powers[:-1], total)
    end, last = op.Add(a, float(_STEPS)), powers[-1]
    factors = [float(bernoulli(k) / math.factorial(2 * k)) for k in range(1, _TERMS + 1)]
    square = op.Mul(end, end)
    tail: ir.Value = ctx.constant(factors[-1], torch.float64)
    for k in range(_TERMS - 1, 0, -1):
        rising = op.Div(op.Mul(op.Add(s, 2.0 * k - 1), op.Add(s, 2.0 * k)), square)
        tail = op.Add(op.Mul(rising, tail), factors[k - 1])
    bracket = op.Add(op.Add(op.Div(end, op.Sub(s, 1.0)), 0.5), op.Mul(op.Div(s, end), tail))
    whole = op.Add(total, op.Mul(last, bracket))
    # Where the last term is nothing beside the sum, the bracket may overflow.
    negligible = op.Less(op.Abs(op.Div(last, total)), torch.finfo(torch.float64).eps / 2)
    return op.Where(negligible, total, whole)


def _terms_of_negative(ctx: LoweringContext, power: ir.Value, q: ir.Value) -> Sequence[ir.Value]:
    """Return the sum of the terms with q + k < 0, and the first q + k after them."""

    def proceed(op: OpBuilder, carried: Carried) -> ir.Value:
        return any_of(op, op.Less(carried[1], 0.0))

    def step(op: OpBuilder, carried: Carried) -> Carried:
        total, a = carried
        below = op.Less(a, 0.0)
        term = op.Where(below, op.Pow(a, power), 0.0)
        return [op.Add(total, term), op.Add(a, op.Cast(below, to=ir.DataType.DOUBLE))]

    return repeat_while(ctx, (ctx.op.Mul(q, 0.0), q), proceed, step)
