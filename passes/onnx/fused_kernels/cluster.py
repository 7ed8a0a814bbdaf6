"""A node, or a growing group of nodes, in the search for groups that become one kernel each."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.fused_kernels.kernel import product

__all__ = ["Cluster", "joined_space"]


@dataclass(eq=False)
class Cluster:
    """A node, or a growing group.

    Attributes:
        nodes: the nodes, in no order.
        bits: the set of its nodes as an integer: a node's bit is its index in the graph.
        ancestors: the nodes of all clusters that it depends on, directly or not.
        descendants: the nodes of all clusters that depend on it.
        points: the number of elements of its largest value; None for a node that is not fused.
        columns: the sizes of a row's axes.
    """

    nodes: list[ir.Node]
    bits: int
    ancestors: int = 0
    descendants: int = 0
    points: Size | None = None
    columns: tuple[Size, ...] = field(default=())


def joined_space(first: Cluster, second: Cluster) -> tuple[Size, tuple[Size, ...]] | None:
    """Return the points and the columns of two groups as one; None where they do not fit."""
    assert first.points is not None
    assert second.points is not None
    if first.columns and second.columns:
        fits = first.points == second.points and product(first.columns) == product(second.columns)
        return (first.points, first.columns) if fits else None
    wide, other = (first, second) if first.columns else (second, first)
    assert wide.points is not None
    if other.points == wide.points:
        return wide.points, wide.columns
    if wide.columns and other.points is not None and other.points * product(wide.columns) == wide.points:
        return wide.points, wide.columns
    return None
