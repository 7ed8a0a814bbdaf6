"""Repetition as often as the session finds necessary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
from onnxscript import OpBuilder

from ort_dynamo.lowering.builder import LoweringBuilder
from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.target import OPSET

__all__ = ["any_of", "repeat_while"]

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
