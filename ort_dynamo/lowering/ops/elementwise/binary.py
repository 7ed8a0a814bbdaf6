"""Elementwise functions of two tensors, or of a tensor and a scalar."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number
from ort_dynamo.lowering.ops.elementwise.integer import integer_power
from ort_dynamo.lowering.ops.elementwise.trigonometry import atan
from ort_dynamo.lowering.ops.elementwise.unary import is_float, log1p, sign_bit, square_root, two
from ort_dynamo.lowering.ops.memory.creation import filled
from ort_dynamo.lowering.recipes.promotion import DEFAULT, INT_TO_FLOAT, KIND, promote, rounded
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.lowering.symbols import same_size
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten
from ort_dynamo.torch_internals.sizes.symbols import known_true

Formula = Callable[[LoweringContext, ir.Value, ir.Value], ir.Value]
Operand = ir.Value | Number


def _single(op_type: str) -> Formula:
    return lambda ctx, a, b: getattr(ctx.op, op_type)(a, b)


# -- sums and products -------------------------------------------------------------------------------------------


@lowering(aten.add.Tensor, aten.add.Scalar)
def add(ctx: LoweringContext, self: Operand, other: Operand, alpha: Number = 1) -> ir.Value:
    """add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return _scaled(ctx, "Add", self, other, alpha)


@lowering(aten.sub.Tensor, aten.sub.Scalar)
def sub(ctx: LoweringContext, self: Operand, other: Operand, alpha: Number = 1) -> ir.Value:
    """sub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return _scaled(ctx, "Sub", self, other, alpha)


@lowering(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(ctx: LoweringContext, self: Operand, other: Operand, alpha: Number = 1) -> ir.Value:
    """rsub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"""
    return _scaled(ctx, "Sub", other, self, alpha)


def _scaled(ctx: LoweringContext, op_type: str, left: Operand, right: Operand, alpha: Number) -> ir.Value:
    """left (op) alpha * right"""
    _check_sum(ctx, op_type, (left, right), alpha)
    stand_ins, shape = _unexpanded(ctx, left, right)
    (a, b), dtype = promote(ctx, left, right, stand_ins=stand_ins)
    if not (isinstance(alpha, (int, float)) and alpha == 1):
        b = ctx.op.Mul(b, ctx.scalar(rounded(alpha, ctx.out.dtype), dtype))
    return _finish(ctx, getattr(ctx.op, op_type)(a, b), shape)


def _check_sum(ctx: LoweringContext, op_type: str, operands: tuple[Operand, Operand], alpha: Number) -> None:
    """Refuse sums that torch's kernels reject: differences of bools, integers times a fraction, and great factors."""
    out = ctx.out.dtype
    ctx.check_range(alpha)
    if op_type == "Sub" and any(
        ctx.dtype(one) == torch.bool if isinstance(one, ir.Value) else isinstance(one, bool) for one in operands
    ):
        raise ctx.refuse("torch does not subtract bool tensors")
    whole = not out.is_floating_point and not isinstance(alpha, (int, torch.SymInt))
    if whole or (isinstance(alpha, bool) and out != torch.bool):
        raise ctx.refuse(f"torch does not take alpha of type {type(alpha).__name__} for a result of {out}")


def _multiply(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    if a.dtype is b.dtype is ir.DataType.BOOL:
        return ctx.op.And(a, b)  # older runtimes have no Mul of bools cast to 8-bit integers
    return ctx.op.Mul(a, b)


# -- powers ------------------------------------------------------------------------------------------------------


@lowering(aten.pow.Tensor_Tensor, aten.pow.Scalar)
def pow_tensor(ctx: LoweringContext, self: Operand, exponent: Operand) -> ir.Value:
    """pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor"""
    (base, power), dtype = promote(ctx, self, exponent)
    if not dtype.is_floating_point:
        return ctx.cast(integer_power(ctx, base, power, dtype), ctx.out.dtype)
    return ctx.cast(ctx.op.Pow(base, power), ctx.out.dtype)


@lowering(aten.pow.Tensor_Scalar)
def pow_scalar(ctx: LoweringContext, self: ir.Value, exponent: Number) -> ir.Value:
    """pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor"""
    ctx.check_range(exponent)
    (x, power), dtype = promote(ctx, self, exponent)
    op = ctx.op
    if isinstance(exponent, (int, float)) and exponent == int(exponent if math.isfinite(exponent) else 0):
        whole = int(exponent)
        if whole == 0:
            return filled(ctx, 1)
        if 1 <= whole <= (3 if dtype.is_floating_point else 64):
            return ctx.cast(_product(ctx, x, whole), ctx.out.dtype)
    if not dtype.is_floating_point:
        if isinstance(exponent, torch.SymInt) and not (dtype == torch.int64 and known_true(exponent >= 0)):
            raise ctx.refuse("torch checks whether a symbolic exponent of integers is negative, and fits")
        if isinstance(exponent, int) and exponent < 0:
            raise ctx.refuse(f"torch does not raise integers to the power {exponent}")  # torch raises
        return ctx.cast(integer_power(ctx, x, power, dtype), ctx.out.dtype)
    # The special cases of torch's own kernel.
    match None if isinstance(exponent, (torch.SymInt, torch.SymFloat)) else exponent:  # which == would guard
        case 0.5:
            result = square_root(ctx, x)
        case -0.5:
            result = op.Reciprocal(square_root(ctx, x))
        case -1:
            result = op.Reciprocal(x)
        case -2:
            result = op.Reciprocal(op.Mul(x, x))
        case _:
            result = op.Pow(x, power)
    return ctx.cast(result, ctx.out.dtype)


def _product(ctx: LoweringContext, x: ir.Value, count: int) -> ir.Value:
    """x multiplied with itself, `count` factors, by repeated squaring."""
    result: ir.Value | None = None
    while True:
        if count & 1:
            result = x if result is None else ctx.op.Mul(result, x)
        count >>= 1
        if not count:
            assert result is not None
            return result
        x = ctx.op.Mul(x, x)


# -- extrema and geometry ----------------------------------------------------------------------------------------


def _ignoring_nan(op_type: str) -> Formula:
    def extremum(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
        op = ctx.op
        result = getattr(op, op_type)(a, b)
        return op.Where(op.IsNaN(a), b, op.Where(op.IsNaN(b), a, result)) if is_float(a) else result

    return extremum


def _copysign(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    op = ctx.op
    magnitude = op.Abs(a)
    return op.Where(sign_bit(ctx, b), op.Neg(magnitude), magnitude)


def _atan2(ctx: LoweringContext, y: ir.Value, x: ir.Value) -> ir.Value:
    # atan of the smaller magnitude over the larger keeps the quotient in [0, 1]; the octant comes back by reflection.
    op = ctx.op
    ay, ax = op.Abs(y), op.Abs(x)
    low, high = op.Min(ay, ax), op.Max(ay, ax)
    quotient = op.Where(op.Equal(low, high), 1.0, op.Div(low, high))  # inf / inf is 1 …
    quotient = op.Where(op.Equal(high, 0.0), 0.0, quotient)  # … and 0 / 0 is 0
    angle = atan(ctx, quotient)
    angle = op.Where(op.Greater(ay, ax), op.Sub(math.pi / 2, angle), angle)
    angle = op.Where(sign_bit(ctx, x), op.Sub(math.pi, angle), angle)
    return op.Where(sign_bit(ctx, y), op.Neg(angle), angle)


def _hypot(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
    op = ctx.op
    aa, ab = op.Abs(a), op.Abs(b)
    low, high = op.Min(aa, ab), op.Max(aa, ab)
    plain = op.Or(op.Equal(high, 0.0), op.Equal(high, math.inf))
    ratio = op.Div(low, op.Where(plain, 1.0, high))
    scaled = op.Mul(high, square_root(ctx, op.Add(op.Mul(ratio, ratio), 1.0)))
    infinite = op.Or(op.IsInf(a), op.IsInf(b))  # also beside a nan
    return op.Where(infinite, math.inf, op.Where(plain, high, scaled))


# -- logarithms of sums ------------------------------------------------------------------------------------------


def _log_add_exp(base: float) -> Formula:
    scale = math.log(base)

    def formula(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
        op = ctx.op
        # The difference of two equal infinities is nan.
        distance = op.Where(op.Equal(a, b), 0.0, op.Abs(op.Sub(a, b)))
        excess = log1p(ctx, op.Exp(op.Mul(distance, -scale)))
        return op.Add(op.Max(a, b), op.Mul(excess, 1 / scale))

    return formula


# -- bits --------------------------------------------------------------------------------------------------------


def _bitwise(op_type: str) -> Formula:
    def formula(ctx: LoweringContext, a: ir.Value, b: ir.Value) -> ir.Value:
        return getattr(ctx.op, op_type if a.dtype == ir.DataType.BOOL else f"Bitwise{op_type}")(a, b)

    return formula


# -- tables ------------------------------------------------------------------------------------------------------

_TYPE_KEEPING: dict[OpOverload, Formula] = {
    aten.mul.Tensor: _multiply,
    aten.mul.Scalar: _multiply,
    aten.maximum.default: _single("Max"),
    aten.minimum.default: _single("Min"),
    aten.fmax.default: _ignoring_nan("Max"),
    aten.fmin.default: _ignoring_nan("Min"),
    aten.hypot.default: _hypot,
    aten.logaddexp.default: _log_add_exp(math.e),
    aten.logaddexp2.default: _log_add_exp(2),
    aten.bitwise_and.Tensor: _bitwise("And"),
    aten.bitwise_and.Scalar: _bitwise("And"),
    aten.bitwise_and.Scalar_Tensor: _bitwise("And"),
    aten.bitwise_or.Tensor: _bitwise("Or"),
    aten.bitwise_or.Scalar: _bitwise("Or"),
    aten.bitwise_or.Scalar_Tensor: _bitwise("Or"),
    aten.bitwise_xor.Tensor: _bitwise("Xor"),
    aten.bitwise_xor.Scalar: _bitwise("Xor"),
    aten.bitwise_xor.Scalar_Tensor: _bitwise("Xor"),
    aten.eq.Tensor: _single("Equal"),
    aten.eq.Scalar: _single("Equal"),
    aten.ne.Tensor: lambda ctx, a, b: ctx.op.Not(ctx.op.Equal(a, b)),
    aten.ne.Scalar: lambda ctx, a, b: ctx.op.Not(ctx.op.Equal(a, b)),
    aten.lt.Tensor: _single("Less"),
    aten.lt.Scalar: _single("Less"),
    aten.le.Tensor: _single("LessOrEqual"),
    aten.le.Scalar: _single("LessOrEqual"),
    aten.gt.Tensor: _single("Greater"),
    aten.gt.Scalar: _single("Greater"),
    aten.ge.Tensor: _single("GreaterOrEqual"),
    aten.ge.Scalar: _single("GreaterOrEqual"),
}

_MATHEMATICAL: dict[OpOverload, Formula] = {
    aten.ldexp.Tensor: lambda ctx, a, b: ctx.op.Mul(a, ctx.op.Pow(two(ctx, a), b)),
    aten.atan2.default: _atan2,
    aten.copysign.Tensor: _copysign,
    aten.copysign.Scalar: _copysign,
}
"""Integers are computed in the default floating-point dtype."""

_LOGICAL: dict[OpOverload, str] = {
    aten.logical_and.default: "And",
    aten.logical_or.default: "Or",
    aten.logical_xor.default: "Xor",
}


def apply_formula(
    formula: Formula, kind: KIND, ctx: LoweringContext, self: Operand, other: Operand, wide_numbers: bool = False
) -> ir.Value:
    """Apply `formula` in the operands' common dtype; the result has the node's dtype and shape (see `promote`)."""
    stand_ins, shape = _unexpanded(ctx, self, other)
    (a, b), _ = promote(ctx, self, other, kind=kind, wide_numbers=wide_numbers, stand_ins=stand_ins)
    return _finish(ctx, formula(ctx, a, b), shape)


def _finish(ctx: LoweringContext, value: ir.Value, shape: ir.Value | None) -> ir.Value:
    result = ctx.cast(value, ctx.out.dtype)
    return result if shape is None else ctx.op.Expand(result, shape)


def _unexpanded(
    ctx: LoweringContext, self: Operand, other: Operand
) -> tuple[dict[ir.Value, ir.Value], ir.Value | None]:
    """Find the sources of expanded operands, and the shape that the result must still be expanded to.

    Gradients of sums and means are full of expanded tensors. Beside a tensor of the full shape the operator broadcasts
    by itself; beside a scalar the expansion can wait.
    """
    for one, another in ((self, other), (other, self)):
        node = one.producer() if isinstance(one, ir.Value) else None
        if node is None or node.op_type != "Expand" or node.inputs[0] is None:
            continue
        assert isinstance(one, ir.Value)
        if not isinstance(another, ir.Value) or another is one:
            return {one: node.inputs[0]}, node.inputs[1]
        if _full(ctx, another):
            return {one: node.inputs[0]}, None
    return {}, None


def _full(ctx: LoweringContext, value: ir.Value) -> bool:
    sizes = ctx.sizes(value)
    return len(sizes) == ctx.out.dim() and all(map(same_size, sizes, ctx.out.shape))


def _logical(op_type: str, ctx: LoweringContext, self: ir.Value, other: ir.Value) -> ir.Value:
    (a, b), dtype = promote(ctx, self, other)  # a scalar that the other operand's dtype wraps around to zero is false
    # Not as casts to bool: defect joined_casts_to_bool.
    held = [one if dtype == torch.bool else ctx.op.Not(ctx.op.Equal(one, 0)) for one in (a, b)]
    result: ir.Value = getattr(ctx.op, op_type)(*held)
    return result


for _overload, _formula in _TYPE_KEEPING.items():
    register(_overload, functools.partial(apply_formula, _formula, DEFAULT, wide_numbers=_formula is _multiply))
for _overload, _formula in _MATHEMATICAL.items():
    register(_overload, functools.partial(apply_formula, _formula, INT_TO_FLOAT))
for _overload, _op_type in _LOGICAL.items():
    register(_overload, functools.partial(_logical, _op_type))
