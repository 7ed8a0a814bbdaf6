"""Shifts, powers and divisors of integers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.ops.memory.views import size_is_zero
from ort_dynamo.lowering.recipes.loops import Carried, any_of, repeat_while
from ort_dynamo.lowering.recipes.promotion import promote
from ort_dynamo.lowering.registry import register
from ort_dynamo.torch_internals.kernels.operators import aten

_UNSIGNED = ir.DataType.UINT64

Formula = Callable[[LoweringContext, ir.Value, ir.Value, torch.dtype], ir.Value]
"""formula(ctx, a, b, dtype): the int64 result for int64 operands that hold values of `dtype`."""


# -- shifts ------------------------------------------------------------------------------------------------------


def _left_shift(ctx: LoweringContext, a: ir.Value, b: ir.Value, dtype: torch.dtype) -> ir.Value:
    op = ctx.op
    bits = torch.iinfo(dtype).bits
    places = op.Clip(b, 0, bits - 1)
    valid = op.And(op.GreaterOrEqual(b, 0), op.Less(b, bits))
    if not _has_shifts(ctx):
        return op.Where(valid, op.Mul(a, _power_of_two(ctx, places)), 0)
    shifted = op.BitShift(op.Cast(a, to=_UNSIGNED), op.Cast(places, to=_UNSIGNED), direction="LEFT")
    return op.Where(valid, op.Cast(shifted, to=ir.DataType.INT64), 0)


def _right_shift(ctx: LoweringContext, a: ir.Value, b: ir.Value, dtype: torch.dtype) -> ir.Value:
    op = ctx.op
    # Limit the shift to the width of the dtype; a negative shift counts as too large.
    most = torch.iinfo(dtype).bits - 1
    places = op.Where(op.Or(op.Less(b, 0), op.Greater(b, most)), 8 if dtype == torch.uint8 else most, b)
    if not _has_shifts(ctx):
        return _shifted_by_division(ctx, a, places)
    # ONNX shifts unsigned integers; a negative value is shifted as its complement.
    sign = op.Where(op.Less(a, 0), -1, 0)
    magnitude = op.Cast(op.BitwiseXor(a, sign), to=_UNSIGNED)
    shifted = op.BitShift(magnitude, op.Cast(places, to=_UNSIGNED), direction="RIGHT")
    return op.BitwiseXor(op.Cast(shifted, to=ir.DataType.INT64), sign)


def _has_shifts(ctx: LoweringContext) -> bool:
    return ctx.target.takes("BitShift", "", {"T": _UNSIGNED})


def _power_of_two(ctx: LoweringContext, exponent: ir.Value) -> ir.Value:
    """Compute 2^exponent as int64, for int64 exponents 0 to 63; 2^63 wraps to the minimum."""
    table = np.left_shift(np.int64(1), np.arange(64))
    return ctx.op.Gather(ctx.builder.constant(table, ir.DataType.INT64), exponent, axis=0)


def _shifted_by_division(ctx: LoweringContext, a: ir.Value, places: ir.Value) -> ir.Value:
    """Shift the int64 `a` to the right by 0 to 63 bits; a negative value is shifted as its complement."""
    op = ctx.op
    negative = op.Less(a, 0)
    magnitude = op.Where(negative, op.Sub(-1, a), a)
    quotient = op.Div(magnitude, _power_of_two(ctx, op.Clip(places, 0, 62)))
    quotient = op.Where(op.Greater(places, 62), 0, quotient)
    return op.Where(negative, op.Sub(-1, quotient), quotient)


# -- powers ------------------------------------------------------------------------------------------------------


def integer_power(ctx: LoweringContext, base: ir.Value, exponent: ir.Value, dtype: torch.dtype) -> ir.Value:
    """Compute base ** exponent of integers, which wraps around like torch's.

    ONNX Runtime's Pow computes in float64, which is exact to 2**53 only and undefined from 2**63 on.
    """
    return _in_int64(_power, ctx, base, exponent, dtype)


def _power(ctx: LoweringContext, base: ir.Value, exponent: ir.Value, dtype: torch.dtype) -> ir.Value:
    op = ctx.op

    def unfinished(op: OpBuilder, carried: Carried) -> ir.Value:
        return any_of(op, op.Greater(carried[2], 0))

    def step(op: OpBuilder, carried: Carried) -> Carried:
        product, factor, left = carried
        half = op.Div(left, 2)
        odd = op.Equal(op.Sub(left, op.Add(half, half)), 1)
        return [op.Where(odd, op.Mul(product, factor), product), op.Mul(factor, factor), half]

    one = op.Expand(ctx.constant(1, torch.int64), ctx.shape(ctx.out.shape))
    product, _, _ = repeat_while(ctx, [one, op.Mul(base, one), op.Mul(op.Max(exponent, 0), one)], unfinished, step)
    # To a negative power: 1 for 1, the sign for -1, else 0.
    odd = op.Mod(exponent, 2)
    inverse = op.Where(
        op.Equal(base, 1), 1, op.Where(op.Equal(base, -1), op.Sub(1, op.Add(odd, odd)), ctx.constant(0, torch.int64))
    )
    return op.Where(op.Less(exponent, 0), inverse, product)


# -- divisors ----------------------------------------------------------------------------------------------------


def _gcd(ctx: LoweringContext, a: ir.Value, b: ir.Value, dtype: torch.dtype) -> ir.Value:
    """Euclid's algorithm."""

    def unfinished(op: OpBuilder, carried: Carried) -> ir.Value:
        return any_of(op, op.Greater(carried[1], 0))

    def step(op: OpBuilder, carried: Carried) -> Carried:
        larger, smaller = carried
        done = op.Equal(smaller, 0)
        divisor = op.Where(done, 1, smaller)  # defect integer_division_traps
        return [op.Where(done, larger, smaller), op.Where(done, 0, op.Mod(larger, divisor))]

    op = ctx.op
    shape = ctx.shape(ctx.out.shape)
    start = [op.Expand(op.Abs(value), shape) for value in (a, b)]
    divisor, _ = repeat_while(ctx, start, unfinished, step)
    return divisor


def _lcm(ctx: LoweringContext, a: ir.Value, b: ir.Value, dtype: torch.dtype) -> ir.Value:
    op = ctx.op
    divisor = op.Max(_gcd(ctx, a, b, dtype), 1)
    return op.Abs(op.Mul(op.Div(a, divisor), b))


# -- registration ------------------------------------------------------------------------------------------------


def _apply(formula: Formula, ctx: LoweringContext, self: ir.Value | Number, other: ir.Value | Number) -> ir.Value:
    """gcd(Tensor self, Tensor other) -> Tensor"""
    (a, b), dtype = promote(ctx, self, other)
    return ctx.cast(_in_int64(formula, ctx, a, b, dtype), ctx.out.dtype)


def _in_int64(formula: Formula, ctx: LoweringContext, a: ir.Value, b: ir.Value, dtype: torch.dtype) -> ir.Value:
    if any(map(size_is_zero, ctx.out.shape)):
        return filled(ctx, 0)  # defect empty_loops
    return formula(ctx, ctx.cast(a, torch.int64), ctx.cast(b, torch.int64), dtype)


for _formula, _packet, _overloads in (
    (_left_shift, aten.bitwise_left_shift, ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
    (_right_shift, aten.bitwise_right_shift, ("Tensor", "Tensor_Scalar", "Scalar_Tensor")),
    (_left_shift, aten.__lshift__, ("Tensor", "Scalar")),
    (_right_shift, aten.__rshift__, ("Tensor", "Scalar")),
    (_gcd, aten.gcd, ("default",)),
    (_lcm, aten.lcm, ("default",)),
):
    for _overload in _overloads:
        register(getattr(_packet, _overload), functools.partial(_apply, _formula))
