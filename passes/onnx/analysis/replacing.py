"""Replace a node by the nodes that a pass has made."""

from __future__ import annotations

import onnx_ir as ir

from ort_dynamo.graph.marks import PASS

__all__ = ["insert_nodes", "replace_node", "replace_outputs"]


def insert_nodes(node: ir.Node, tape: ir.tape.Tape, by: ir.passes.InPlacePass) -> None:
    """Insert the nodes on `tape`, marked with the pass that made them, before a node of a graph."""
    assert node.graph is not None
    for made in tape.nodes:
        made.metadata_props[PASS] = repr(by)
    node.graph.insert_before(node, tape.nodes)


def replace_node(node: ir.Node, tape: ir.tape.Tape, result: ir.Value, by: ir.passes.InPlacePass) -> None:
    """Replace a node of one output by the nodes on `tape`, whose `result` gets the output's name, type and shape.

    Args:
        node: a node of a graph.
        tape: the nodes that replace it, in order.
        result: the value that is read in place of the node's.
        by: the pass that made it, which the nodes are marked with.
    """
    graph, old = node.graph, node.outputs[0]
    assert graph is not None
    insert_nodes(node, tape, by)
    result.name, result.type, result.shape = old.name, old.type, old.shape
    ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def replace_outputs(graph: ir.Graph, old: ir.Value, new: ir.Value) -> bool:
    """Return `new` wherever a graph returns `old`; it takes over the type and shape that it does not state itself.

    Returns:
        Whether the graph returned `old`.
    """
    places = [index for index, output in enumerate(graph.outputs) if output is old]
    for index in places:
        graph.outputs[index] = new
    if places:
        new.type, new.shape = new.type or old.type, new.shape or old.shape
    return bool(places)
