"""Find the nodes that a node of an ONNX graph depends on."""

from __future__ import annotations

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.subgraphs import subgraphs_of

__all__ = ["makers_of"]


def makers_of(node: ir.Node) -> set[ir.Node]:
    """Collect the nodes of the same graph whose values `node` reads, also those that its sub-graphs capture."""
    inputs = [*node.inputs]
    for graph in subgraphs_of(node):
        inputs += [value for inner in ir.traversal.RecursiveGraphIterator(graph) for value in inner.inputs]
        inputs.extend(graph.outputs)
    makers = {value.producer() for value in inputs if value is not None}
    return {maker for maker in makers if maker is not None and maker.graph is node.graph}
