"""The graphs inside a node."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["subgraphs_of"]


def subgraphs_of(node: ir.Node) -> list[ir.Graph]:
    """List the branches of an If, or the body of a Loop or Scan; not the subgraphs in these."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs += attribute.as_graphs()
    return graphs
