"""Writes a choice that the session makes when it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from ort_dynamo.lowering.builder import LoweringBuilder
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.op_builder import OpBuilder
from ort_dynamo.targets.target import OPSET

__all__ = ["all_finite", "chooses", "either", "if_finite", "is_small"]

Branch = Callable[[OpBuilder], Sequence[ir.Value]]
"""Builds one branch with the op builder of its own graph; it may read the values around it."""


def either(
    ctx: LoweringContext,
    condition: ir.Value,
    then: Branch,
    otherwise: Branch,
    *,
    op: OpBuilder | None = None,
    place: str = "",
) -> tuple[ir.Value, ...]:
    """Choose the values of `then` if the 0-d bool `condition` is true, else those of `otherwise`, of equal types.

    Args:
        ctx: the node's context.
        condition: the condition.
        then: builds one branch.
        otherwise: builds the other branch.
        op: the builder of the enclosing branch, if there is one.
        place: inside a branch, a unique prefix for the names of the two graphs.
    """
    branches = {
        "then_branch": _graph(ctx, f"{place}then", then),
        "else_branch": _graph(ctx, f"{place}else", otherwise),
    }
    outputs = branches["then_branch"].outputs
    found = (op or ctx.op).If(condition, **branches, _outputs=len(outputs))
    values = (found,) if isinstance(found, ir.Value) else tuple(found)
    for value, output in zip(values, outputs, strict=True):
        value.dtype = output.dtype
    return values


def all_finite(ctx: LoweringContext, value: ir.Value) -> ir.Value:
    """Compute, as a 0-d bool, whether all elements are finite; also False if the sum of finite ones overflows."""
    return ctx.op.Less(ctx.op.Abs(ctx.op.ReduceSum(value, keepdims=0)), math.inf)


def if_finite(ctx: LoweringContext, value: ir.Value, shortcut: Branch, exact: Branch) -> tuple[ir.Value, ...]:
    """Choose `shortcut` if all elements of `value` are finite, else `exact`, which is right for every value."""
    if not chooses(ctx):
        return tuple(exact(ctx.op))
    return either(ctx, all_finite(ctx, value), shortcut, exact)


def chooses(ctx: LoweringContext) -> bool:
    """Check whether a session may choose by its data. On a device, the host would wait for the condition."""
    return not ctx.target.facts.computes_on_streams


_SMALL = 1 << 12
"""Maximum number of entries for which a Where is faster than a check for finite entries."""


def is_small(sizes: Sequence[Size]) -> bool:
    """Check whether a tensor of `sizes` is too small for a run-time choice between two forms to pay."""
    count = math.prod(sizes)
    return isinstance(count, int) and count <= _SMALL


def _graph(ctx: LoweringContext, name: str, build: Branch) -> ir.Graph:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=f"{ctx.node.name}_{name}")
    builder = LoweringBuilder(graph, ctx.target)
    builder.origin = ctx.builder.origin
    builder.push_module(f"{ctx.node.name}.{name}")  # no two branches share a name
    graph.outputs.extend(build(builder.op))
    return graph
