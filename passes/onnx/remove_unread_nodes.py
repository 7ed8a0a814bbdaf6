"""Remove dead nodes; with a branch, also the nodes that only the branch reads."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.subgraphs import subgraphs_of

__all__ = ["RemoveUnreadNodes"]


@dataclass(frozen=True)
class RemoveUnreadNodes(ir.passes.InPlacePass):
    """Remove a node if no node, no sub-graph and no output reads its results.

    onnx_ir's RemoveUnusedNodesPass removes an If or a Loop and leaves the nodes that its sub-graphs read: the nodes
    inside still count as readers there. It runs afterwards, for initializers and optional outputs.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every graph of the model."""
        return ir.passes.PassResult(model, _remove_unread(model.graph))


def _remove_unread(graph: ir.Graph) -> bool:
    modified = False
    for node in reversed(graph):  # readers before the makers of their inputs
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            _remove(graph, node)
            modified = True
            continue
        for inner in subgraphs_of(node):
            modified |= _remove_unread(inner)
    return modified


def _remove(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a node with all nodes inside it, so that these read nothing any more."""
    for inner in subgraphs_of(node):
        inner.outputs.clear()
        for one in reversed(inner):
            _remove(inner, one)
    graph.remove(node, safe=True)
