"""Finds the nodes whose results a discontinuous operator reads before they are rounded."""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from ort_dynamo.passes.onnx.analysis.casts import is_narrowing
from ort_dynamo.passes.onnx.analysis.constants import number_of
from ort_dynamo.passes.onnx.analysis.subgraphs import subgraphs_of

__all__ = ["is_discontinuous", "nodes_before_decisions"]

_COMPARISONS = frozenset({"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"})

_DISCONTINUOUS = (
    _COMPARISONS
    | {"ArgMax", "ArgMin", "Cast", "Ceil", "Floor", "IsInf", "IsNaN", "Mod", "NonZero", "Round", "Sign", "TopK"}
    | {"Unique"}
)

_RANGE_CHECKS = frozenset({"IsInf", "IsNaN"})
"""Their result is the same for the rounded number, apart from a float16 overflow."""

_SIZES = frozenset({"Shape", "Size"})
"""Read no element of their input."""


def is_discontinuous(node: ir.Node) -> bool:
    """Check whether the result of a node jumps where its input changes by a rounding."""
    return not node.domain and node.op_type in _DISCONTINUOUS


def nodes_before_decisions(graph: ir.Graph) -> set[ir.Node]:
    """Find the discontinuous nodes, and all nodes whose results they read, with other nodes in between or without.

    A rounding ends the search: x -> Cast to a narrower float -> Equal depends on the rounding's result. A node that has
    one of the found nodes in a subgraph is found, too, and so are all nodes that compute its results.

    Returns:
        The nodes, of the graph and its subgraphs. Checks for NaN and infinity, and nodes before them, are not among
        them.
    """
    owners: dict[ir.Graph | ir.Function | None, ir.Node] = {}
    waiting: list[ir.Node] = []
    for node in RecursiveGraphIterator(graph):
        owners.update(dict.fromkeys(subgraphs_of(node), node))
        if _decides(node):
            waiting.append(node)
    found: set[ir.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        if node.graph in owners:
            waiting.append(owners[node.graph])
        if node.op_type not in _SIZES:
            read = [*node.inputs, *(value for inner in subgraphs_of(node) for value in inner.outputs)]
            waiting += [made for value in read if (made := _maker(value)) is not None]
    return found


def _maker(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes a float, unless it rounds one."""
    if value is None or not _may_be_float(value):
        return None
    node = value.producer()
    return None if node is None or is_narrowing(node) else node


def _decides(node: ir.Node) -> bool:
    if not is_discontinuous(node) or node.op_type in _RANGE_CHECKS:
        return False
    if node.op_type == "Cast":
        return _may_be_float(node.inputs[0]) and not _is_float(node.outputs[0].dtype)
    if node.op_type in _COMPARISONS and any(map(_is_infinite, node.inputs)):
        return False
    return any(map(_may_be_float, node.inputs))


def _may_be_float(value: ir.Value | None) -> bool:
    return value is not None and (value.dtype is None or _is_float(value.dtype))


def _is_float(dtype: ir.DataType | None) -> bool:
    return dtype is not None and dtype.is_floating_point()


def _is_infinite(value: ir.Value | None) -> bool:
    """Check whether a value is a constant, infinite number."""
    number = number_of(value) if value is not None and _may_be_float(value) else None
    return number is not None and math.isinf(number)
