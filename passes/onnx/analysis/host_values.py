"""Find values that a session computes on the host: sizes, and the indices by which an operator reads."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ort_dynamo.graph.marks import NUMBER
from ort_dynamo.passes.onnx.analysis.subgraphs import subgraphs_of

__all__ = ["MEASURES", "READ_ON_HOST", "host_nodes", "is_host_number"]

MEASURES = frozenset({"Shape", "Size"})
"""Operators whose result is on the host."""

READ_ON_HOST: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Dropout": (1, 2),
    "Expand": (1,),
    "If": (0,),
    "Loop": (0, 1),
    "OneHot": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}
"""Operator -> the inputs that its CUDA kernel reads on the host."""


def host_nodes(graph: ir.Graph) -> frozenset[ir.Node]:
    """Return the nodes of a graph that compute sizes, or values that are read on the host.

    They stay nodes of ONNX Runtime, which runs them on the CPU: as part of a kernel they would be copied to the device
    and back. The condition of an If is none of them: it is one element, but computed from whole tensors.
    """
    found: set[ir.Node] = set()
    pending = [
        node.inputs[index]
        for node in graph.all_nodes()
        if node.op_type != "If"
        for index in READ_ON_HOST.get(node.op_type, ())
        if index < len(node.inputs)
    ]
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is not None and node not in found:
            found.add(node)
            pending += node.inputs
    sized: set[ir.Value] = set()
    for node in graph:
        if all(value.dtype == ir.DataType.INT64 for value in node.outputs) and _is_of(node, sized):
            found.add(node)
            sized.update(node.outputs)
    return frozenset(found)


def is_host_number(value: ir.Value) -> bool:
    """Check whether a value is one int64 that a session has on the host: a number that it is fed, or one of sizes."""
    if value.dtype != ir.DataType.INT64 or value.shape is None or any(dim != 1 for dim in value.shape):
        return False
    return NUMBER in value.meta or is_of_sizes(value, integers=True)


def is_of_sizes(value: ir.Value, *, integers: bool = False) -> bool:
    """Check whether a value is computed from shapes and constants alone; with `integers`, in int64 alone."""
    sized, left = set[ir.Value](), [value]
    while left:
        node = left[-1].producer()
        if left[-1] in sized:
            left.pop()
        elif node is None or (integers and left[-1].dtype != ir.DataType.INT64):
            return False
        elif _is_of(node, sized):
            sized.add(left.pop())
        elif unknown := [one for one in _read_values(node) if one not in sized]:
            left += unknown
        else:
            return False
    return True


def _is_of(node: ir.Node, sized: set[ir.Value]) -> bool:
    """Check whether a node measures a tensor, or computes something of these values and constants alone.

    If a kernel takes such a value on the host, its result is on the device. A subgraph may read other values.
    """
    if node.op_type in MEASURES:
        return True
    read = _read_values(node)
    told = READ_ON_HOST.get(node.op_type, ())
    return (
        bool(read)
        and not node.domain
        and not subgraphs_of(node)
        and all(one in sized for one in read)
        and not any(node.inputs[i] in read for i in told if i < len(node.inputs))
    )


def _read_values(node: ir.Node) -> list[ir.Value]:
    return [one for one in node.inputs if one is not None and ir.convenience.get_const_tensor(one) is None]
