"""Tensors from scalars."""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Number, Size
from ort_dynamo.lowering.registry import lowering, register
from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, prims


def filled(ctx: LoweringContext, number: Number) -> ir.Value:
    """Return a tensor like the node's output, filled with `number`."""
    value = ctx.element(number, ctx.out.dtype)
    if ctx.out.dim() == 0:
        return value
    return ctx.op.Expand(value, ctx.shape(ctx.out.shape))


def _fill(number: Number, ctx: LoweringContext, *args: Any, **kwargs: Any) -> ir.Value:
    return filled(ctx, number)


_FILLS: dict[OpOverload, Number] = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.zero.default: 0,
    aten._efficientzerotensor.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
    # Nobody may rely on the content of an empty tensor.
    aten.empty.memory_format: 0,
    aten.empty_like.default: 0,
    aten.empty_permuted.default: 0,
    aten.new_empty.default: 0,
}

for _overload, _number in _FILLS.items():
    register(_overload, functools.partial(_fill, _number))


@lowering(aten.empty_strided.default, aten.new_empty_strided.default)
def empty_strided(ctx: LoweringContext, *args: Any, **kwargs: Any) -> ir.Value:
    """empty_strided(SymInt[] size, SymInt[] stride, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(ctx, 0)


@lowering(aten.full.default, aten.full_like.default, aten.fill.Scalar)
def full(ctx: LoweringContext, size: Any, fill_value: Number, **kwargs: Any) -> ir.Value:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(ctx, fill_value)


@lowering(aten.new_full.default)
def new_full(ctx: LoweringContext, self: ir.Value, size: Any, fill_value: Number, **kwargs: Any) -> ir.Value:
    """new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, ...) -> Tensor"""
    return filled(ctx, fill_value)


@lowering(aten.fill.Tensor)
def fill_tensor(ctx: LoweringContext, self: ir.Value, value: ir.Value) -> ir.Value:
    """fill.Tensor(Tensor self, Tensor value) -> Tensor"""
    number = ctx.cast(value, ctx.out.dtype)
    return ctx.op.Expand(number, ctx.shape(ctx.out.shape))


@lowering(aten.scalar_tensor.default, prims.scalar_tensor.default)
def scalar_tensor(ctx: LoweringContext, s: Number, **kwargs: Any) -> ir.Value:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, ...) -> Tensor"""
    return ctx.element(s, ctx.out.dtype)


@lowering(aten.arange.start_step)
def arange(ctx: LoweringContext, start: Number, end: Number, step: Number = 1, **kwargs: Any) -> ir.Value:
    """arange.start_step(Scalar start, Scalar end, Scalar step=1, *, ScalarType? dtype=None, ...) -> Tensor"""
    op = ctx.op
    if ctx.out.dtype == torch.bool:
        raise ctx.refuse("arange of dtype bool")  # torch has no kernel for it
    if not any(isinstance(number, (float, torch.SymFloat)) for number in (start, end, step)):
        return ctx.cast(op.Range(*(ctx.scalar(number, torch.int64) for number in (start, end, step))), ctx.out.dtype)
    (count,) = ctx.out.shape
    index = op.Range(ctx.constant(0, torch.int64), ctx.scalar(count, torch.int64), ctx.constant(1, torch.int64))
    if not ctx.out.dtype.is_floating_point:
        start, step = int(start), int(step)
    # start + index * step as torch computes it: in float64, or int64, and rounded once.
    dtype = torch.float64 if ctx.out.dtype.is_floating_point else torch.int64
    scaled = op.Mul(ctx.cast(index, dtype), ctx.scalar(step, dtype))
    return ctx.cast(op.Add(scaled, ctx.scalar(start, dtype)), ctx.out.dtype)


@lowering(aten.tril_indices.default, aten.triu_indices.default)
def triangle_indices(ctx: LoweringContext, row: Size, col: Size, offset: int = 0, **kwargs: Any) -> ir.Value:
    """tril_indices(int row, int col, int offset=0, *, ScalarType? dtype=long, ...) -> Tensor"""
    rows, columns = ctx.static([row, col], "the size of the triangle")
    lower = ctx.node.target == aten.tril_indices.default
    inside = [(i, j) for i in range(rows) for j in range(columns) if (j - i <= offset if lower else j - i >= offset)]
    numbers = [i for i, _ in inside] + [j for _, j in inside]
    return ctx.cast(ctx.reshape(ctx.ints(numbers), [2, len(inside)]), ctx.out.dtype)
