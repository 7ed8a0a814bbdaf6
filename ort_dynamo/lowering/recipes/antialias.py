"""Computes, while the session runs, the matrix of antialiased resizing along an axis of symbolic size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.recipes.branches import if_finite
from ort_dynamo.lowering.recipes.interpolation import Resize

__all__ = ["AntialiasedMatrix", "apply_matrices", "matrix_of"]


@dataclass(frozen=True)
class AntialiasedMatrix:
    """(out, size), and of the same shape which of its entries are under the filter: torch multiplies by those."""

    weights: ir.Value
    under: ir.Value


def _triangle(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return the linear filter at distances `x`."""
    return op.Max(op.Sub(1.0, x), 0.0)


def _keys(op: OpBuilder, x: ir.Value) -> ir.Value:
    """Return the cubic filter with a = -1/2 at distances `x` (R. Keys, Cubic Convolution Interpolation, 1981)."""
    near = op.Add(op.Mul(op.Mul(op.Sub(op.Mul(x, 1.5), 2.5), x), x), 1.0)
    far = op.Mul(op.Sub(op.Mul(op.Add(op.Mul(op.Sub(x, 5.0), x), 8.0), x), 4.0), -0.5)
    return op.Where(op.Less(x, 1.0), near, op.Where(op.Less(x, 2.0), far, 0.0))


_FILTERS: dict[str, tuple[int, Callable[[OpBuilder, ir.Value], ir.Value]]] = {
    "linear_aa": (2, _triangle),
    "cubic_aa": (4, _keys),
}
"""Mode -> (pixels under the filter where nothing is shrunk, the filter)."""


def _step(ctx: LoweringContext, axis: Resize[Size]) -> ir.Value:
    """From one output to the next, in pixels of the input: 0-d."""
    op = ctx.op
    if axis.align_corners:
        if isinstance(axis.out, int) and axis.out == 1:
            return ctx.constant(0.0, axis.dtype)
        return op.Div(ctx.scalar(axis.size - 1, axis.dtype), ctx.scalar(axis.out - 1, axis.dtype))
    if axis.scale is not None and axis.scale > 0:
        return ctx.constant(1.0 / axis.scale, axis.dtype)
    return op.Div(ctx.scalar(axis.size, axis.dtype), ctx.scalar(axis.out, axis.dtype))


def matrix_of(ctx: LoweringContext, axis: Resize[Size]) -> AntialiasedMatrix:
    """Compute the weights of ATen's _compute_indices_weights_aa, normalised for each output.

    Raises:
        UnsupportedNodeError: a filter that is not here.
    """
    if axis.mode not in _FILTERS:
        raise ctx.refuse(f"a size of a resize with the filter {axis.mode.removesuffix('_aa')} is symbolic")
    op, (taps, weigh) = ctx.op, _FILTERS[axis.mode]

    def numbers(size: Size) -> ir.Value:
        return op.Range(ctx.constant(0, torch.int64), ctx.scalar(size, torch.int64), ctx.constant(1, torch.int64))

    step, length = _step(ctx, axis), ctx.scalar(axis.size, torch.int64)
    wide = op.Max(step, 1.0)
    support = op.Mul(wide, taps / 2)
    centre = op.Unsqueeze(op.Mul(op.Add(ctx.cast(numbers(axis.out), axis.dtype), 0.5), step), [1])
    first = op.Max(ctx.cast(op.Add(op.Sub(centre, support), 0.5), torch.int64), 0)
    end = op.Min(ctx.cast(op.Add(op.Add(centre, support), 0.5), torch.int64), length)
    places = numbers(axis.size)
    under = op.And(op.GreaterOrEqual(places, first), op.Less(places, end))
    distance = op.Abs(op.Div(op.Add(op.Sub(ctx.cast(places, axis.dtype), centre), 0.5), wide))
    weights = op.Where(under, weigh(op, distance), 0.0)
    total = op.ReduceSum(weights, [1], keepdims=1)
    return AntialiasedMatrix(op.Div(weights, op.Where(op.Equal(total, 0.0), 1.0, total)), under)


def apply_matrices(
    ctx: LoweringContext, value: ir.Value, matrices: Sequence[AntialiasedMatrix], transposed: bool
) -> ir.Value:
    """Map a value (..., height, width) by the two matrices of its axes, or by their transposes for the gradient."""

    def plain(op: OpBuilder) -> list[ir.Value]:
        result = value
        for place, matrix in enumerate(matrices):
            result = _product(op, result, matrix.weights, place, transposed)
        return [result]

    def with_infinities(op: OpBuilder) -> list[ir.Value]:
        result = value
        for place, matrix in enumerate(matrices):
            result = _spread(op, result, matrix, place, transposed)
        return [result]

    return if_finite(ctx, value, plain, with_infinities)[0]


def _product(op: OpBuilder, value: ir.Value, matrix: ir.Value, place: int, transposed: bool) -> ir.Value:
    """`value` mapped along its last dimension but one (0) or last one (1)."""
    if (place == 1) != transposed:
        matrix = op.Transpose(matrix, perm=[1, 0])
    result: ir.Value = op.MatMul(matrix, value) if place == 0 else op.MatMul(value, matrix)
    return result


def _spread(op: OpBuilder, value: ir.Value, matrix: AntialiasedMatrix, place: int, transposed: bool) -> ir.Value:
    """Return the matmul, where infinity and NaN reach only elements under the filter: found by matmuls of marks."""
    dtype = value.dtype
    assert dtype is not None

    def marks(test: ir.Value) -> ir.Value:
        return op.Cast(test, to=dtype)

    def reached(entries: ir.Value, weights: ir.Value) -> ir.Value:
        return op.Greater(_product(op, entries, weights, place, transposed), 0.0)

    above, below = op.Equal(value, float("inf")), op.Equal(value, float("-inf"))
    nan, infinite = op.IsNaN(value), op.Or(above, below)
    plus, minus = op.Greater(matrix.weights, 0.0), op.Less(matrix.weights, 0.0)
    nothing = op.And(matrix.under, op.Equal(matrix.weights, 0.0))
    up = op.Or(reached(marks(above), marks(plus)), reached(marks(below), marks(minus)))
    down = op.Or(reached(marks(below), marks(plus)), reached(marks(above), marks(minus)))
    undefined = op.Or(reached(marks(nan), marks(matrix.under)), reached(marks(infinite), marks(nothing)))
    finite = _product(op, op.Where(op.Or(nan, infinite), 0.0, value), matrix.weights, place, transposed)
    result = op.Where(up, float("inf"), op.Where(down, float("-inf"), finite))
    return op.Where(op.Or(undefined, op.And(up, down)), float("nan"), result)
