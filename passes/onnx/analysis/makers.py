"""What a node of an ONNX graph waits for."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["makers_of"]


def makers_of(node: ir.Node) -> set[ir.Node]:
    """Collect the nodes of the same graph whose values `node` reads, also those that its sub-graphs capture."""
    inputs = [*node.inputs]
    for attribute in node.attributes.values():
        for graph in _graphs(attribute):
            inputs += [value for inner in ir.traversal.RecursiveGraphIterator(graph) for value in inner.inputs]
            inputs.extend(graph.outputs)
    makers = {value.producer() for value in inputs if value is not None}
    return {maker for maker in makers if maker is not None and maker.graph is node.graph}


def _graphs(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []
