"""Slices and splits that read one of several equal pieces of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.analysis.constants import constant_of
from ort_dynamo.passes.onnx.fused_kernels.layouts import CannotFuseError

__all__ = ["piece_of"]


def piece_of(node: ir.Node, value: ir.Value, before: Sequence[Size], after: Sequence[Size]) -> tuple[int, int] | None:
    """Return the axis and index of one of several equal pieces that a Slice or a Split reads; None for other nodes.

    Raises:
        CannotFuseError: it reads another part.
    """
    if node.op_type == "Split":
        axis = node.attributes.get_int("axis", 0) % len(before)
        sizes = [1 if one.shape is None else one.shape[axis] for one in node.outputs]
        number = node.outputs.index(value)
        if len(set(sizes)) > 1 or before[axis] != Size(len(sizes)) * after[axis] or after[axis].symbols:
            raise CannotFuseError("a Split has pieces of unequal or symbolic sizes")
        return axis, number
    if node.op_type != "Slice":
        return None
    starts, ends, axes, steps = (constant_of(one) for one in [*node.inputs[1:], None, None][:4])
    if not starts or not ends or len(starts) != 1 or (steps or [1]) != [1] or (len(node.inputs) > 3 and not axes):
        raise CannotFuseError("a Slice has several axes, steps, or bounds that are not constants")
    axis = (axes or [0])[0] % len(before)
    size, found = before[axis], after[axis]
    if size.symbols or found.symbols or not found.factor or size.factor % found.factor:
        raise CannotFuseError("a Slice is not one of several equal pieces")
    first = min(max(starts[0] + size.factor if starts[0] < 0 else starts[0], 0), size.factor)
    if first % found.factor:
        raise CannotFuseError("a Slice does not begin at a multiple of its size")
    return axis, first // found.factor
