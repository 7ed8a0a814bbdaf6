"""Move nodes that read only a graph's inputs to just before their first reader."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.makers import makers_of
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["SinkReads"]

_REARRANGE = frozenset(["Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])
"""Operators whose result has the elements of their first input."""


@ordering(needs=[Condition.IN_ORDER])
@dataclass(frozen=True)
class SinkReads(ir.passes.InPlacePass):
    """Moves a node that reads only inputs and constants to just before the first node that reads its result.

    A run holds its inputs until it ends, so only the lifetime of the result changes, and becomes shorter. Nodes that
    rearrange the elements of such a result move with it. AOTAutograd's backward begins with views of all saved tensors,
    and each may be a copy in ONNX.

    All other nodes keep their order, also a node whose result is only an output.
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
