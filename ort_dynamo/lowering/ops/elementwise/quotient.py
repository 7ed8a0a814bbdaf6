"""Quotients and remainders of two tensors, or of a tensor and a scalar."""

from __future__ import annotations

import functools
from collections.abc import Callable

import onnx_ir as ir
import torch

from ort_dynamo.graph.marks import ZERO_DIVISOR
from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.ops.elementwise.binary import Formula, Operand, apply_formula
from ort_dynamo.lowering.ops.elementwise.unary import is_float, truncate
from ort_dynamo.lowering.recipes.promotion import DEFAULT, INT_TO_FLOAT, KIND, narrowed
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten
from ort_dynamo.torch_internals.kernels.promotion import elementwise_dtypes
from ort_dynamo.torch_internals.sizes.symbols import known_true

Step = Callable[[ir.Value], ir.Value]
"""A function that is applied to the result of each step of a formula."""


def _true_divide(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    return ctx.op.Div(a, b)


def _divide_trunc(ctx: LoweringContext, a: ir.Value, b: ir.Value, step: Step = lambda value: value) -> ir.Value:
    quotient = ctx.op.Div(a, b)
    return truncate(ctx, step(quotient)) if is_float(a) else quotient


def _divide_floor(ctx: LoweringContext, a: ir.Value, b: ir.Value, step: Step = lambda value: value) -> ir.Value:
    op = ctx.op
    if not is_float(a):
        quotient = op.Div(a, b)
        remainder = op.Sub(a, op.Mul(quotient, b))
        lower = op.And(op.Not(op.Equal(remainder, 0)), op.Xor(op.Less(b, 0), op.Less(remainder, 0)))
        return op.Sub(quotient, op.Cast(lower, to=a.dtype))
    # Python's float floor division, as in c10::div_floor_floating: floor(a / b) is one too large where a / b rounds up.
    remainder = op.Mod(a, b, fmod=1)
    quotient = step(op.Div(step(op.Sub(a, remainder)), b))
    lower = op.And(op.Not(op.Equal(remainder, 0.0)), op.Xor(op.Less(b, 0.0), op.Less(remainder, 0.0)))
    quotient = op.Where(lower, step(op.Sub(quotient, 1.0)), quotient)
    whole = op.Floor(quotient)
    nearest = op.Where(op.Greater(op.Sub(quotient, whole), 0.5), op.Add(whole, 1.0), whole)
    return op.Where(op.Equal(b, 0.0), op.Div(a, b), nearest)


def _remainder(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    op = ctx.op
    if not is_float(a):
        return op.Mod(a, b)
    remainder = op.Mod(a, b, fmod=1)
    other_sign = op.And(op.Not(op.Equal(remainder, 0.0)), op.Xor(op.Less(b, 0.0), op.Less(remainder, 0.0)))
    return op.Where(other_sign, op.Add(remainder, b), remainder)


def _fmod(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    op = ctx.op
    if not is_float(a):  # the kernel with fmod=1 computes integers in float64
        return op.Sub(a, op.Mul(op.Div(a, b), b))
    return op.Mod(a, b, fmod=1)


_WITH_WIDE_NUMBERS = (_true_divide, _divide_trunc, _divide_floor)
_QUOTIENTS: dict[str | None, Formula] = {None: _true_divide, "trunc": _divide_trunc, "floor": _divide_floor}


@lowering(aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode)
def div(ctx: LoweringContext, self: Operand, other: Operand, rounding_mode: str | None = None) -> ir.Value:
    """div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"""
    kind = DEFAULT if rounding_mode else INT_TO_FLOAT
    return _apply_quotient(_QUOTIENTS[rounding_mode], kind, ctx, self, other)


def _apply_quotient(formula: Formula, kind: KIND, ctx: LoweringContext, self: Operand, other: Operand) -> ir.Value:
    operands = [ctx.fake(o) if isinstance(o, ir.Value) else o for o in (self, other)]
    dtype, result = elementwise_dtypes(*operands, type_promotion_kind=kind)
    wide_numbers = formula in _WITH_WIDE_NUMBERS
    self = narrowed(ctx, self, result) if isinstance(self, ir.Value) else self  # torch rounds all but the divisor
    if not dtype.is_floating_point:
        formula = _of_integers(ctx, formula, other, dtype)
    elif formula in (_divide_trunc, _divide_floor) and _is_stepwise(ctx, other, result):
        formula = functools.partial(_in_steps, formula, result)
    return apply_formula(formula, kind, ctx, self, other, wide_numbers=wide_numbers)


def _is_stepwise(ctx: LoweringContext, divisor: Operand, dtype: torch.dtype) -> bool:
    """Check whether torch rounds each step to `dtype`, a half one, which it does not for a divisor of one element."""
    if not isinstance(divisor, ir.Value) or dtype not in (torch.float16, torch.bfloat16):
        return False
    return any(not isinstance(size, int) or size != 1 for size in ctx.sizes(divisor))


def _in_steps(
    formula: Callable[..., ir.Value], dtype: torch.dtype, ctx: LoweringContext, a: ir.Value, b: ir.Value
) -> ir.Value:
    """Apply `formula` to halves in float32, with the result of each step rounded to `dtype`."""
    ctx.read_rounded()

    def step(value: ir.Value) -> ir.Value:
        return ctx.convert(ctx.convert(value, dtype), torch.float32)

    return formula(ctx, ctx.convert(a, torch.float32), ctx.convert(b, torch.float32), step)


# -- integers ----------------------------------------------------------------------------------------------------
#
# Defect integer_division_traps: the CPU's kernels end the process at a division by zero, and at one of the least
# integer by -1. torch raises a RuntimeError at the first; the second wraps around.


def _of_integers(ctx: LoweringContext, formula: Formula, divisor: Operand, dtype: torch.dtype) -> Formula:
    """Apply `formula` to a division in `dtype`, with the care that this divisor needs."""
    if isinstance(divisor, int):
        number = int(torch.tensor(divisor).to(dtype))  # 256 is 0 in uint8
        if number == 0:  # folded when the session opens, the division would fail there, where eager runs up to it
            raise ctx.refuse("integer division by 0")
        safe = number != -1
    else:
        # A narrower dtype may hold it as 0.
        safe = isinstance(divisor, torch.SymInt) and dtype == torch.int64 and known_true(divisor > 0)
    return functools.partial(_in_kernel_dtype, formula if safe else functools.partial(_by_any_divisor, formula))


def _in_kernel_dtype(formula: Formula, ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    """Narrow integers in int32, where their quotients cannot overflow: cast back, they wrap around."""
    if a.dtype not in (ir.DataType.INT32, ir.DataType.INT64):
        a, b = ctx.convert(a, torch.int32), ctx.convert(b, torch.int32)
    return formula(ctx, a, b)


def _by_any_divisor(formula: Formula, ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    op = ctx.op
    if not all(known_true(size > 0) for size in ctx.out.shape):
        b = op.Add(op.Sub(a, a), b)  # a divisor that meets no dividend may be zero
    zero, minus_one = op.Equal(b, 0), op.Equal(b, -1)
    result = formula(ctx, a, op.Where(op.Or(zero, minus_one), _one_unless_any(ctx, zero, b), b))
    # By 1 and by -1 the remainders are 0.
    return result if formula in (_remainder, _fmod) else op.Where(minus_one, op.Neg(a), result)


def _one_unless_any(ctx: LoweringContext, zero: ir.Value, divisor: ir.Value) -> ir.Value:
    """1 in the divisor's dtype; on the CPU, an error of the run where any of `zero` holds.

    The error is that of an index beyond the end of a table of one entry. As the division takes part of its divisor from
    there, it waits for it, and no optimizer can drop it. On CUDA torch divides by zero without an error.
    """
    op, dtype = ctx.op, divisor.dtype
    assert dtype is not None
    if not ctx.target.facts.raises_at_data:
        return ctx.builder.constant(1, dtype)
    count = op.ReduceSum(op.Cast(zero, to=ir.DataType.INT64), keepdims=0)
    return op.Gather(ctx.builder.constant([1], dtype), count, axis=0, _name=f"{ZERO_DIVISOR}.{ctx.node.name}")


# -- tables ------------------------------------------------------------------------------------------------------

_REMAINDERS: dict[OpOverload, Formula] = {
    aten.floor_divide.default: _divide_floor,
    aten.floor_divide.Scalar: _divide_floor,
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Scalar_Tensor: _remainder,
    aten.fmod.Tensor: _fmod,
    aten.fmod.Scalar: _fmod,
}

for _overload, _formula in _REMAINDERS.items():
    register(_overload, functools.partial(_apply_quotient, _formula, DEFAULT))
