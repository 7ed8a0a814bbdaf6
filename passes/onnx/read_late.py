"""Move nodes that read only a graph's inputs to just before their first reader."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.makers import makers_of
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["ReadLate"]

_REARRANGE = frozenset(["Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])
"""Operators whose result has the elements of their first input."""


@ordering(needs=[Condition.IN_ORDER])
@dataclass(frozen=True)
class ReadLate(ir.passes.InPlacePass):
    """Moves a node that reads nothing but inputs and constants to just before the first node that reads its result.

    A run holds its inputs until it ends, so nothing is alive longer for that, and the result for a shorter time. Nodes
    that only rearrange the elements of such a result go with it. AOTAutograd's backward begins with views of all that
    the forward saved, each of which may be a copy in ONNX.

    The order of all other nodes stays. A node that nothing reads, as its result is returned, stays as well.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Reorder the main graph's nodes."""
        graph = model.graph
        nodes = list(graph)
        makers = {node: makers_of(node) for node in nodes}
        waiting = _late(makers)
        order: list[ir.Node] = []

        def run(node: ir.Node) -> None:
            for maker in sorted(waiting.keys() & makers[node], key=waiting.__getitem__):
                if maker in waiting:
                    run(maker)
            waiting.pop(node, None)
            order.append(node)

        for node in nodes:
            if node not in waiting:
                run(node)
        if order == nodes:
            return ir.passes.PassResult(model, False)
        graph.remove(nodes)
        graph.extend(order)
        return ir.passes.PassResult(model, True)


def _late(makers: Mapping[ir.Node, Set[ir.Node]]) -> dict[ir.Node, int]:
    """Give the nodes that can wait, with their indices; each is read by another one, and so is run before the last."""
    found: dict[ir.Node, int] = {}
    for place, (node, reads) in enumerate(makers.items()):
        rearranges = node.op_type in _REARRANGE and not node.domain
        if any(value.uses() for value in node.outputs) and (not reads or (rearranges and reads <= found.keys())):
            found[node] = place
    return found
