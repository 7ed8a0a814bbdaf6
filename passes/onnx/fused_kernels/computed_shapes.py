"""The nodes that compute the shape which a Reshape or an Expand is given, from the shapes of tensors.

A kernel knows these sizes as symbols, and needs no such node. The function of a fused node repeats them: so the node
reads the measured tensors and no shape, and the session need not have the shape on the host before a launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.constants import constant_of, number_of
from ort_dynamo.passes.onnx.analysis.host_values import MEASURES, is_of_sizes

__all__ = ["measured", "measuring", "shape_sources"]

_SHAPED = frozenset({"Expand", "Reshape"})
_MOST_NODES = 48


def shape_sources(node: ir.Node) -> list[ir.Value] | None:
    """Return the tensors from whose shapes the shape is made that a node of data movement is given; none if constant.

    None is for a shape that is made of anything else, and for a Gather with more than one index.
    """
    placed = [one for one in node.inputs[1:] if one is not None]
    if node.op_type == "Gather" and (number_of(placed[0]) is None or placed[0].shape != ir.Shape([])):
        return None
    if all(constant_of(one) is not None for one in placed):
        return []
    if node.op_type not in _SHAPED or not is_of_sizes(placed[0], integers=True):
        return None
    nodes = measuring([node])
    may_vary = any(one.is_graph_input() for each in nodes for one in _read(each))
    return None if may_vary or len(nodes) > _MOST_NODES else measured(nodes)


def measuring(nodes: Sequence[ir.Node]) -> list[ir.Node]:
    """Return the nodes that compute the shapes which these nodes are given, each after those that it reads."""
    found: dict[ir.Node, None] = {}
    left = [node.inputs[1] for node in reversed(nodes) if node.op_type in _SHAPED and not node.domain]
    while left:
        node = _maker(left[-1])
        if node is None or node in found:
            left.pop()
        elif pending := [one for one in _read(node) if (maker := _maker(one)) is not None and maker not in found]:
            left += pending
        else:
            found[node] = None
            left.pop()
    return list(found)


def measured(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """Return the tensors whose shapes nodes of `measuring` read."""
    return list(dict.fromkeys(one for node in nodes if node.op_type in MEASURES for one in node.inputs if one))


def _maker(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes a value; None for a constant."""
    return None if value is None or ir.convenience.get_const_tensor(value) is not None else value.producer()


def _read(node: ir.Node) -> list[ir.Value]:
    return [] if node.op_type in MEASURES else [one for one in node.inputs if one is not None]
