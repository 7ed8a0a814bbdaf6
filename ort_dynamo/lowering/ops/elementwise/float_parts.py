"""Mantissa and exponent of floats, and nextafter. ONNX cannot view the bits of a float."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import torch

from ort_dynamo.graph.dtypes import onnx_dtype
from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.recipes.promotion import promote
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten


def _exponent_of(number: float) -> int:
    """Give the exponent e of 2**e."""
    return math.frexp(number)[1] - 1


def _powers_of_two(ctx: LoweringContext, exponents: np.ndarray[tuple[int], np.dtype[np.int64]], dtype: torch.dtype,
                   places: ir.Value) -> ir.Value:  # fmt: skip
    """Look up powers of 2 in a table, at the indices `places`: Pow may be inexact."""
    table = ctx.builder.constant(np.ldexp(1.0, exponents), onnx_dtype(dtype))
    return ctx.op.Gather(table, places, axis=0)


def _parts(ctx: LoweringContext, x: ir.Value, dtype: torch.dtype) -> tuple[ir.Value, ir.Value]:
    """(m, e) with |x| = m 2**e and 1/2 ≤ m < 1, e int64; for a finite `x` of `dtype` that is not zero."""
    op = ctx.op
    limits = torch.finfo(dtype)
    lowest, digits = _exponent_of(limits.smallest_normal), 1 - _exponent_of(limits.eps)
    magnitude = op.Abs(x)
    subnormal = op.Less(magnitude, limits.smallest_normal)
    normal = op.Where(subnormal, op.Mul(magnitude, 2.0**digits), magnitude)
    # The logarithm may be off by one near a power of two. The multiplication below is exact and corrects it.
    guess = op.Cast(op.Floor(op.Mul(op.Log(normal), 1 / math.log(2))), to=ir.DataType.INT64)
    guess = op.Clip(guess, lowest, -lowest + 1)
    scaled = op.Mul(normal, _powers_of_two(ctx, -np.arange(lowest, -lowest + 2), dtype, op.Sub(guess, lowest)))
    high, low = op.GreaterOrEqual(scaled, 2.0), op.Less(scaled, 1.0)
    mantissa = op.Mul(scaled, op.Where(high, 0.25, op.Where(low, 1.0, ctx.constant(0.5, dtype))))
    shift = op.Add(op.Where(high, 2, op.Where(low, 0, 1)), op.Where(subnormal, -digits, 0))
    return mantissa, op.Add(guess, shift)


def _without_parts(ctx: LoweringContext, x: ir.Value) -> ir.Value:
    """Mark the elements of `x` that are zero, infinite or NaN."""
    op = ctx.op
    magnitude = op.Abs(x)
    return op.Not(op.And(op.Greater(magnitude, 0.0), op.Less(magnitude, math.inf)))


@lowering(aten.frexp.Tensor)
def frexp(ctx: LoweringContext, self: ir.Value) -> tuple[ir.Value, ...]:
    """frexp.Tensor(Tensor self) -> (Tensor mantissa, Tensor exponent)"""
    op = ctx.op
    (x,), dtype = promote(ctx, self)
    whole = _without_parts(ctx, x)
    mantissa, exponent = _parts(ctx, op.Where(whole, 1.0, x), dtype)
    mantissa = op.Where(whole, x, op.Mul(mantissa, op.Sign(x)))
    exponent = op.Where(whole, 0, exponent)
    return ctx.cast(mantissa, ctx.out[0].dtype), ctx.cast(exponent, ctx.out[1].dtype)


@lowering(aten.nextafter.default)
def nextafter(ctx: LoweringContext, self: ir.Value, other: ir.Value) -> ir.Value:
    """nextafter(Tensor self, Tensor other) -> Tensor"""
    op = ctx.op
    # float16 and bfloat16 are computed in float32, which holds all of them; the spacing is that of the result.
    (x, towards), dtype = promote(ctx, self, other)
    limits = torch.finfo(ctx.out.dtype)
    tiny = limits.smallest_normal * limits.eps
    whole = _without_parts(ctx, x)
    mantissa, exponent = _parts(ctx, op.Where(whole, 1.0, x), dtype)
    rises = op.Greater(towards, x)
    shrinks = op.Xor(op.Greater(x, 0.0), rises)
    # Floats right below a power of two are twice as dense as those above it.
    closer = op.Cast(op.And(shrinks, op.Equal(mantissa, 0.5)), to=ir.DataType.INT64)
    held = torch.finfo(dtype)
    lowest, highest = _exponent_of(held.smallest_normal * held.eps), _exponent_of(held.max) + 1
    digits = 1 - _exponent_of(limits.eps)
    spacings = np.maximum(np.arange(lowest, highest + 1) - digits, _exponent_of(tiny))
    step = _powers_of_two(ctx, spacings, dtype, op.Sub(op.Sub(exponent, closer), lowest))
    step = op.Where(op.Equal(x, 0.0), tiny, step)
    moved = op.Where(rises, op.Add(x, step), op.Sub(x, step))
    moved = op.Where(op.IsInf(x), op.Clip(x, limits.min, limits.max), moved)
    moved = op.Where(op.Equal(moved, 0.0), op.Mul(x, 0.0), moved)  # -0.0 from below
    moved = op.Where(op.Equal(x, towards), towards, moved)
    unknown = op.Or(op.IsNaN(x), op.IsNaN(towards))
    return ctx.cast(op.Where(unknown, math.nan, moved), ctx.out.dtype)
