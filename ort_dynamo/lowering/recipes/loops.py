"""Writes loops that repeat as often as the session finds necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from ort_dynamo.lowering.builder import LoweringBuilder
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.targets.target import OPSET

__all__ = ["any_of", "for_each", "repeat_while"]

Carried = Sequence[ir.Value]


class _Body:
    """The body of the Loop that a node becomes.

    Attributes:
        graph: the body, with its inputs so far and without outputs.
        op: the builder of nodes in it.
        index: 0-d int64, the index of the step.
        condition: 0-d bool, whether this step runs.
    """

    def __init__(self, ctx: LoweringContext) -> None:
        self._prefix = f"{ctx.node.name}.body"
        imports = {"": OPSET, "com.microsoft": 1}
        self.graph = ir.Graph([], [], nodes=[], opset_imports=imports, name=f"{ctx.node.name}_body")
        builder = LoweringBuilder(self.graph, ctx.target)
        builder.origin = ctx.builder.origin
        builder.push_module(self._prefix)  # no two bodies share a name
        self.op = builder.op
        self.index = builder.input(f"{self._prefix}.iteration", ir.DataType.INT64, [])
        self.condition = builder.input(f"{self._prefix}.condition", ir.DataType.BOOL, [])
        self._carried = 0

    def carry(self, type_: ir.TypeProtocol | None) -> ir.Value:
        """Add a carried value; give its value before a step."""
        value = ir.Value(name=f"{self._prefix}.carried_{self._carried}", type=type_)
        self._carried += 1
        self.graph.inputs.append(value)
        return value


def any_of(op: OpBuilder, mask: ir.Value) -> ir.Value:
    """Compute, as a 0-d bool, whether any element is set."""
    return op.Greater(op.ReduceSum(op.Cast(mask, to=ir.DataType.INT64), keepdims=0), 0)


def repeat_while(
    ctx: LoweringContext,
    start: Carried,
    proceed: Callable[[OpBuilder, Carried], ir.Value],
    step: Callable[[OpBuilder, Carried], Carried],
) -> tuple[ir.Value, ...]:
    """Apply `step` to `start` as long as `proceed`, a 0-d bool, holds.

    Both functions build with the op builder they are given and may read the values around the loop. The dtype and
    shape of each carried value stay the same.
    """
    body = _Body(ctx)
    results = list(step(body.op, [body.carry(value.type) for value in start]))
    body.graph.outputs.extend([proceed(body.op, results), *results])
    found = ctx.op.Loop(None, proceed(ctx.op, start), *start, body=body.graph, _outputs=len(start))
    values = (found,) if isinstance(found, ir.Value) else tuple(found)
    for value, before in zip(values, start, strict=True):
        value.dtype = before.dtype
    return values


def for_each(
    ctx: LoweringContext,
    count: Size,
    start: Carried,
    step: Callable[[OpBuilder, ir.Value, Carried], tuple[Carried, Carried, Carried]],
) -> tuple[list[ir.Value], list[ir.Value], list[ir.Value]]:
    """Run `step` for each index below `count`, in order, and return its results.

    Args:
        ctx: the node's context.
        count: the number of steps.
        start: the carried values before the first step; their dtypes and shapes stay the same.
        step: given the op builder of the loop's body, the index (0-d int64) and the carried values, returns the carried
            values, blocks and slabs. It may read the values around the loop.

    Returns:
        The carried values after the last step; for each block a sequence, whose length along any dimension may change
        from step to step; for each slab a tensor of them all along a new first dimension.
    """
    body = _Body(ctx)
    op, outputs = body.op, body.graph.outputs
    carried, blocks, slabs = step(op, body.index, [body.carry(value.type) for value in start])
    grown, empty = [], []
    for block in blocks:
        assert block.dtype is not None
        type_ = ir.SequenceType(ir.TensorType(block.dtype))
        grown.append(op.SequenceInsert(body.carry(type_), block))
        empty.append(ctx.op.SequenceEmpty(dtype=block.dtype))
        grown[-1].type = empty[-1].type = type_
    outputs.extend([op.Identity(body.condition), *carried, *grown, *slabs])
    found = ctx.op.Loop(
        ctx.scalar(count, torch.int64), None, *start, *empty, body=body.graph, _outputs=len(outputs) - 1
    )
    values = [found] if isinstance(found, ir.Value) else list(found)
    for value, inside in zip(values, outputs[1:], strict=True):
        value.type = inside.type
    ends = len(start), len(start) + len(blocks)
    return values[: ends[0]], values[ends[0] : ends[1]], values[ends[1] :]
