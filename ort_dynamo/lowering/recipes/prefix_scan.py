"""Writes running reductions other than a sum: each element combined with all before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch
from onnxscript import OpBuilder

from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.recipes.loops import repeat_while

__all__ = ["prefix_scan"]

Combine = Callable[[OpBuilder, ir.Value, ir.Value], ir.Value]
"""combine(op, earlier, later): an associative function of two values."""


def prefix_scan(ctx: LoweringContext, value: ir.Value, axis: int, size: Size, combine: Combine) -> ir.Value:
    """Scan `value`, inclusively, along `axis`, which has `size` elements.

    By doubling (Hillis and Steele 1986): after the step of `shift`, each place holds the combination of 2 * shift
    entries. A symbolic size is doubled up to in a loop.
    """
    if isinstance(size, torch.SymInt):
        length = ctx.scalar(size, torch.int64)

        def proceed(op: OpBuilder, carried: Sequence[ir.Value]) -> ir.Value:
            return op.Less(carried[1], length)

        def step(op: OpBuilder, carried: Sequence[ir.Value]) -> list[ir.Value]:
            scanned, shift = carried
            places = op.Reshape(shift, [1])
            return [_step(op, scanned, axis, places, op.Neg(places), combine), op.Add(shift, shift)]

        return repeat_while(ctx, (value, ctx.constant(1, torch.int64)), proceed, step)[0]
    shift = 1
    while shift < size:
        value = _step(ctx.op, value, axis, ctx.ints([shift]), ctx.ints([-shift]), combine)
        shift *= 2
    return value


def _step(op: OpBuilder, value: ir.Value, axis: int, shift: ir.Value, back: ir.Value, combine: Combine) -> ir.Value:
    head = op.Slice(value, [0], shift, [axis])
    earlier = op.Slice(value, [0], back, [axis])
    later = op.Slice(value, shift, [sys.maxsize], [axis])
    return op.Concat(head, combine(op, earlier, later), axis=axis)
