"""Writes checks of data: the session stops where eager's kernel raises an error.

A check rides on a value that the graph needs: its Reshape takes a shape out of a table of one row, and a check that
fails looks up the second row. So the check runs first, no optimizer can drop it, and no element is copied. The node's
name has eager's words, from which `runtime/data_errors.py` makes the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ort_dynamo.graph.marks import EMPTY, REFUSED
from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.recipes.branches import either
from ort_dynamo.torch_internals.sizes.symbols import known_true

__all__ = ["any_of", "called", "has_elements", "none_missing", "outside", "outside_or_nan", "stop_if", "stop_if_any"]

Check = Callable[[OpBuilder], ir.Value]


def stop_if(
    ctx: LoweringContext, wrong: ir.Value, value: ir.Value, words: str, rank: int, *, kind: str = REFUSED
) -> ir.Value:
    """Give `value` with a check: the session stops if `wrong` is true.

    On CUDA, whose kernels do not check indices, and in a file, `value` is returned unchecked.

    Args:
        ctx: the node's context.
        wrong: a 0-d bool, which must not be a constant.
        value: a value that the node computes with; its readers read the result instead.
        words: eager's message, without an apostrophe.
        rank: the rank of `value`.
        kind: REFUSED or EMPTY, which decide the error's class.
    """
    if not ctx.target.facts.raises_at_data or ctx.target.stands_alone:
        return value
    return ctx.op.Reshape(value, _shape_unless(ctx, ctx.op, wrong, words, rank, kind))


def stop_if_any(
    ctx: LoweringContext, suspect: ir.Value, value: ir.Value, checks: Sequence[tuple[Check, str]], rank: int
) -> ir.Value:
    """Give `value` with checks that run only if `suspect` is true; the session stops if one is true.

    So valid arguments cost no more than `suspect`. The rest is as in `stop_if`.

    Args:
        ctx: the node's context.
        suspect: a 0-d bool, which must not be a constant, and is true if a check is.
        value: a value that the node computes with; its readers read the result instead.
        checks: each has eager's message, and gives a 0-d bool by the op builder of its branch.
        rank: the rank of `value`.
    """
    if not ctx.target.facts.raises_at_data or ctx.target.stands_alone:
        return value

    def run(op: OpBuilder) -> list[ir.Value]:
        shape = unchanged
        for wrong, words in checks:
            shape = op.Add(shape, _shape_unless(ctx, op, wrong(op), words, rank, REFUSED))
        return [shape]

    unchanged = ctx.builder.constant(np.zeros(rank, np.int64), ir.DataType.INT64)
    (shape,) = either(ctx, suspect, run, lambda op: [op.Identity(unchanged)])
    return ctx.op.Reshape(value, shape)


def _shape_unless(ctx: LoweringContext, op: OpBuilder, wrong: ir.Value, words: str, rank: int, kind: str) -> ir.Value:
    """Give the shape that keeps a value's own sizes, by a lookup that stops the session where `wrong` holds."""
    table = ctx.builder.constant(np.zeros((1, rank), np.int64), ir.DataType.INT64)
    row = op.Cast(wrong, to=ir.DataType.INT64)
    return op.Gather(table, row, axis=0, _name=f"{kind}.{ctx.node.name}: {words}")


def any_of(ctx: LoweringContext, wrong: ir.Value) -> ir.Value:
    """Compute, as a 0-d bool, whether any element of a bool is set."""
    return ctx.op.ReduceMax(wrong, keepdims=0)


def outside(op: OpBuilder, value: ir.Value, low: float, high: float) -> ir.Value:
    """Compute, as a 0-d bool, whether an element of a float value is outside [low, high]; NaN may be missed."""
    least, greatest = op.ReduceMin(value, keepdims=0), op.ReduceMax(value, keepdims=0)
    return op.Or(op.Less(least, low), op.Greater(greatest, high))


def outside_or_nan(op: OpBuilder, value: ir.Value, low: float, high: float) -> ir.Value:
    """Compute, as a 0-d bool, whether an element of a floating-point value is not within [low, high], or NaN."""
    return op.Or(outside(op, value, low, high), op.IsNaN(op.ReduceSum(value, keepdims=0)))


def called(ctx: LoweringContext) -> str:
    """Give the name of the node's operator in torch's messages, such as "max"."""
    name = str(ctx.node.target).split(".")[1]
    return "median" if name == "nanmedian" else name


def none_missing(
    ctx: LoweringContext,
    value: ir.Value,
    axes: Sequence[int] | None,
    operator: str,
) -> ir.Value:
    """Give `value` with a check that a reduction over `axes` has elements; else the session stops.

    A reduction that is known to be empty runs in torch, which raises the same error. One that is known to have elements
    needs no check.

    Args:
        ctx: the node's context.
        value: one of the node's arguments.
        axes: the reduced dimensions, counted from the front; None for all.
        operator: the name of the operator in eager's message.

    Returns:
        A value with the same facts (`ctx.sizes` and so on).
    """
    sizes = ctx.sizes(value)
    reduced = list(sizes) if axes is None else [sizes[axis] for axis in axes]
    if axes is None:
        words = f"{operator}(): Expected reduction dim to be specified for input.numel() == 0."
    else:
        words = f"{operator}(): Expected reduction dim {', '.join(map(str, axes))} to have non-zero size."
    if is_empty(reduced):
        raise ctx.refuse(f"reduction of an empty tensor, for which torch raises an error or gives NaN: {words}")
    if all(has_elements(size) for size in reduced):
        return value
    op = ctx.op
    count = op.Size(value) if axes is None else op.ReduceProd(op.Gather(op.Shape(value), ctx.ints(axes)), keepdims=0)
    return ctx.stand_in(stop_if(ctx, op.Equal(count, 0), value, words, len(sizes), kind=EMPTY), value)


def has_elements(size: Size) -> bool:
    """Check whether a size is known not to be zero; installs no guard."""
    return size > 0 if isinstance(size, int) else known_true(size > 0)
