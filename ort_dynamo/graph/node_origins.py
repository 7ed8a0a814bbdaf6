"""The origins of a compiled graph's nodes, as plain values: they outlive the graph, and a pickle holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import NamedTuple

from torch.fx import GraphModule, Node

from ort_dynamo.graph.marks import WHOLE_NODE
from ort_dynamo.graph.source_line import module_path, user_line

__all__ = ["IslandNodes", "NodeOrigin", "NodeOrigins", "find_origins", "mark_nodes", "operator_name"]


class NodeOrigin(NamedTuple):
    """The place of one node.

    Attributes:
        name: the node's.
        overload: its operator; "" of an input. One of several results of an operator has that operator.
        module: the innermost module that called it, such as "layers.0.mlp (Linear)"; "" outside of modules. An input
            has that of a node that reads it.
        line: the user's line; of an input, that of the same reader.
    """

    name: str
    overload: str
    module: str
    line: str


class IslandNodes(NamedTuple):
    """The nodes of the whole graph that an island has.

    Attributes:
        nodes: the index of each of its nodes, in order; -1 of its output, and of an input that is a size.
        results: the index of each of its results.
    """

    nodes: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class NodeOrigins:
    """The origins of the nodes of a graph, and of the graphs that it was cut into.

    Attributes:
        role: "forward", "backward", "inference" or "training".
        nodes: of the graph before it was cut, in order.
        outer: of each node of the outer graph, in order, the index of the node in `nodes`; -1 of one that passes added.
        islands: of each island by name, the nodes.
    """

    role: str
    nodes: tuple[NodeOrigin, ...]
    outer: tuple[int, ...]
    islands: Mapping[str, IslandNodes]


def mark_nodes(gm: GraphModule) -> None:
    """Write on the nodes of a graph who they are, for `find_origins`: copies in other graphs keep it."""
    for node in gm.graph.nodes:
        node.meta[WHOLE_NODE] = node.name


def find_origins(gm: GraphModule, outer: GraphModule, islands: Mapping[str, GraphModule], role: str) -> NodeOrigins:
    """Find out where the nodes of a graph come from.

    Args:
        gm: the graph before it was cut, with the names that `mark_nodes` saw.
        outer: the graph around its islands.
        islands: the islands by name.
        role: the role of the graph.
    """
    indices = {node.name: index for index, node in enumerate(gm.graph.nodes)}

    def numbers(nodes: Iterable[Node]) -> tuple[int, ...]:
        return tuple(indices.get(node.meta.get(WHOLE_NODE, ""), -1) for node in nodes)

    found = {}
    for name, island in islands.items():
        (output,) = island.graph.find_nodes(op="output")
        found[name] = IslandNodes(numbers(island.graph.nodes), numbers(output.args[0]))
    return NodeOrigins(role, tuple(map(_origin, gm.graph.nodes)), numbers(outer.graph.nodes), found)


def _origin(node: Node) -> NodeOrigin:
    if node.op == "call_function":
        return NodeOrigin(node.name, operator_name(node), module_path(node), user_line(node))
    reader = next((user for user in node.users if user.op == "call_function"), None)
    if reader is None:
        return NodeOrigin(node.name, "", "", "")
    return NodeOrigin(node.name, "", module_path(reader), user_line(reader))


def operator_name(node: Node) -> str:
    """Return the operator that computes a node, such as "aten.topk.default", for each of its results as well."""
    while node.target is getitem and isinstance(source := node.args[0], Node):
        node = source
    return str(node.target)
