"""Inclusive scans other than a cumulative sum: each element is combined with all before it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.context import LoweringContext, Size, is_empty
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.lowering.recipes.loops import repeat_while
from ort_dynamo.torch_internals.sizes.symbols import is_unbacked

__all__ = ["prefix_scan"]

Combine = Callable[[OpBuilder, ir.Value, ir.Value], ir.Value]
"""combine(op, earlier, later): an associative function of two values, which may broadcast."""

_BLOCK = 8
"""Entries that are combined one after another. More would be more nodes, fewer more levels."""

_RUN = 16
"""Entries side by side from which on parts are copied as rows."""


def prefix_scan(
    ctx: LoweringContext,
    value: ir.Value,
    axis: int,
    sizes: Sequence[Size],
    combine: Combine,
    neutral: float,
    within: torch.dtype | None = None,
) -> ir.Value:
    """Scan `value`, of shape `sizes`, inclusively along `axis`.

    A fixed size is split into blocks. Each block is scanned alone, and the blocks' last entries are scanned in the same
    way: a little more than two combinations per entry. A symbolic size uses a loop of doubling shifts (Hillis and
    Steele 1986): after the step of `shift`, each index holds the combination of 2 * shift entries.

    Args:
        ctx: the node's.
        value: any dtype that `combine` takes.
        axis: counted from the front.
        sizes: its shape.
        combine: applied to parts of `value`, all at once.
        neutral: the neutral element of `combine`.
        within: the dtype to combine in, and of the result, if not that of `value`.
    """
    size = sizes[axis]
    op = ctx.op

    def widened(value: ir.Value) -> ir.Value:
        return value if within is None else ctx.cast(value, within)

    if isinstance(size, torch.SymInt) or is_unbacked(*sizes) or is_empty(sizes):
        return _by_doubling(ctx, widened(value), axis, size, combine)
    if size == 1:
        return widened(value)
    if size <= _BLOCK:
        parts = op.Split(widened(value), axis=axis, num_outputs=size, _outputs=size)
        return op.Concat(*_chain(op, parts, combine), axis=axis)
    blocks = -(-size // _BLOCK)
    if missing := blocks * _BLOCK - size:  # entries that nothing comes after, so any will do
        value = op.Concat(value, op.Slice(value, [0], [missing], [axis]), axis=axis)
    before, after = list(sizes[:axis]), list(sizes[axis + 1 :])
    value = ctx.reshape(value, [*before, blocks, _BLOCK, *after])
    place, rank = axis + 1, len(sizes) + 1
    run = math.prod(after)
    to_front = isinstance(run, int) and run < _RUN
    if to_front:
        value = op.Transpose(value, perm=[place, *(a for a in range(rank) if a != place)])
        place = 0
    value = widened(value)
    parts = _chain(op, op.Split(value, axis=place, num_outputs=_BLOCK, _outputs=_BLOCK), combine)
    lasts = [*before, blocks, *after]
    totals = prefix_scan(ctx, ctx.reshape(parts[-1], lasts), axis, lasts, combine, neutral)
    assert value.dtype is not None
    first = op.Expand(ctx.builder.constant(neutral, value.dtype), ctx.shape([*before, 1, *after]))
    earlier = op.Concat(first, op.Slice(totals, [0], [-1], [axis]), axis=axis)
    result = combine(op, op.Unsqueeze(earlier, [place]), op.Concat(*parts, axis=place))
    if to_front:
        result = op.Transpose(result, perm=[*range(1, axis + 2), 0, *range(axis + 2, rank)])
    result = ctx.reshape(result, [*before, blocks * _BLOCK, *after])
    return op.Slice(result, [0], [size], [axis]) if missing else result


def _chain(op: OpBuilder, parts: Sequence[ir.Value], combine: Combine) -> list[ir.Value]:
    """Each part combined with all before it."""
    chain = [parts[0]]
    for part in parts[1:]:
        chain.append(combine(op, chain[-1], part))
    return chain


def _by_doubling(ctx: LoweringContext, value: ir.Value, axis: int, size: Size, combine: Combine) -> ir.Value:
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
