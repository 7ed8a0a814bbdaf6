"""Repetition as often as the session finds necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch
from onnxscript import OpBuilder

from ort_dynamo.lowering.builder import LoweringBuilder
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.target import OPSET

__all__ = ["any_of", "for_each", "repeat_while"]

Carried = Sequence[ir.Value]


def any_of(op: OpBuilder, mask: ir.Value) -> ir.Value:
    """A 0-d bool: whether any entry is set."""
    return op.Greater(op.ReduceSum(op.Cast(mask, to=ir.DataType.INT64), keepdims=0), 0)


def repeat_while(
    ctx: LoweringContext,
    start: Carried,
    proceed: Callable[[OpBuilder, Carried], ir.Value],
    step: Callable[[OpBuilder, Carried], Carried],
) -> tuple[ir.Value, ...]:
    """What becomes of `start` when `step` is applied as long as `proceed`, a 0-d bool, holds.

    Both functions build with the op builder they are given and may read the values around the loop. The dtype and
    shape of each carried value stay the same.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=f"{ctx.node.name}_body")
    builder = LoweringBuilder(graph, ctx.target)
    builder.origin = ctx.builder.origin
    builder.push_module(f"{ctx.node.name}.body")  # no two bodies share a name
    prefix = f"{ctx.node.name}.body"
    builder.input(f"{prefix}.iteration", ir.DataType.INT64, [])
    builder.input(f"{prefix}.condition", ir.DataType.BOOL, [])
    inside = []
    for index, value in enumerate(start):
        carried = ir.Value(name=f"{prefix}.carried_{index}", type=value.type)
        graph.inputs.append(carried)
        inside.append(carried)
    results = list(step(builder.op, inside))
    graph.outputs.extend([proceed(builder.op, results), *results])
    found = ctx.op.Loop(None, proceed(ctx.op, start), *start, body=graph, _outputs=len(start))
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
    """`step` for each index below `count`, in order, and what it leaves.

    Args:
        ctx: of the node.
        count: how often.
        start: the carried values before the first step; their dtypes and shapes stay the same.
        step: given the op builder of the loop's body, the index (0-d int64) and the carried values, returns the carried
            values, blocks and slabs. It may read the values around the loop.

    Returns:
        The carried values after the last step; for each block a sequence, whose length along any dimension may change
        from step to step; for each slab a tensor of them all along a new first dimension.
    """
    prefix = f"{ctx.node.name}.body"
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET, "com.microsoft": 1}, name=f"{ctx.node.name}_body")
    builder = LoweringBuilder(graph, ctx.target)
    builder.origin = ctx.builder.origin
    builder.push_module(prefix)
    index = builder.input(f"{prefix}.iteration", ir.DataType.INT64, [])
    condition = builder.input(f"{prefix}.condition", ir.DataType.BOOL, [])

    def carry(number: int, type_: ir.TypeProtocol | None) -> ir.Value:
        value = ir.Value(name=f"{prefix}.carried_{number}", type=type_)
        graph.inputs.append(value)
        return value

    op = builder.op
    carried, blocks, slabs = step(op, index, [carry(number, value.type) for number, value in enumerate(start)])
    grown, empty = [], []
    for number, block in enumerate(blocks, start=len(start)):
        assert block.dtype is not None
        type_ = ir.SequenceType(ir.TensorType(block.dtype))
        grown.append(op.SequenceInsert(carry(number, type_), block))
        empty.append(ctx.op.SequenceEmpty(dtype=block.dtype))
        grown[-1].type = empty[-1].type = type_
    graph.outputs.extend([op.Identity(condition), *carried, *grown, *slabs])
    found = ctx.op.Loop(
        ctx.scalar(count, torch.int64), None, *start, *empty, body=graph, _outputs=len(graph.outputs) - 1
    )
    values = [found] if isinstance(found, ir.Value) else list(found)
    for value, inside in zip(values, graph.outputs[1:], strict=True):
        value.type = inside.type
    ends = len(start), len(start) + len(blocks)
    return values[: ends[0]], values[ends[0] : ends[1]], values[ends[1] :]
