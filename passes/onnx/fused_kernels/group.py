"""A group of nodes that becomes one kernel."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size

__all__ = ["MOVES", "Group"]

MOVES = frozenset({
    "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
})  # fmt: skip
"""Operators that compute nothing and whose elements are found by arithmetic of indices; of Gather, with one index."""


@dataclass(frozen=True)
class Group:
    """Nodes that become one kernel.

    Attributes:
        nodes: in the order of the graph; no path between two of them leads through another node.
        inputs: values that they read and do not make, without constants that are part of the kernel.
        outputs: their results that other nodes read.
        columns: sizes of the axes that its rows have; none where nothing is reduced.
    """

    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    columns: tuple[Size, ...]
