"""Writes Expand to a constant shape without elements, which ONNX Runtime's optimizer would remove."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ort_dynamo.lowering.op_builder import OpBuilder

__all__ = ["emptying"]

Values = Sequence[ir.Value | None]


def emptying(op_type: str, domain: str, inputs: Values) -> Callable[[OpBuilder, Values], ir.Value] | None:
    """Return the nodes of an Expand to sizes of which one is a constant 0; None for other nodes.

    They are an Expand to size 1 there and a Slice of nothing, which avoid the defect expand_to_nothing.
    """
    if op_type != "Expand" or domain or inputs[1] is None or inputs[1].const_value is None:
        return None
    sizes = [int(size) for size in inputs[1].const_value.numpy()]
    if 0 not in sizes:
        return None

    def written(op: OpBuilder, inputs: Values) -> ir.Value:
        none = [place - len(sizes) for place, size in enumerate(sizes) if size == 0]
        expanded = op.Expand(inputs[0], [size or 1 for size in sizes])
        result: ir.Value = op.Slice(expanded, [0] * len(none), [0] * len(none), none)
        return result

    return written
