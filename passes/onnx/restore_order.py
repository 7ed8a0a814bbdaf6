"""Nodes go back to the order they had before an optimizer rewrote the model."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.makers import makers_of
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["RestoreOrder"]


@ordering(gives=[Condition.IN_ORDER])
@dataclass(frozen=True)
class RestoreOrder(ir.passes.InPlacePass):
    """Sorts the main graph topologically; ties are broken by the original index of each value.

    ONNX Runtime orders nodes depth first from the graph's last output. In a backward graph this computes all gradients
    of activations before those of weights, so nearly everything is alive at once, recomputed tensors included.
    AOTAutograd's order computes each gradient as soon as possible.

    A new node (from a fusion that keeps no name) comes right after the producers of its inputs. The algorithm is Kahn's
    (CACM 5(11), 1962) with a queue ordered by index.

    Attributes:
        places: name of a value -> its index in the order to restore. Omitted outputs have no name and no index.
    """

    places: Mapping[str, int] = field(repr=False)

    @classmethod
    def of(cls, model: ir.Model) -> RestoreOrder:
        """Make the pass that restores the order of `model`."""
        outputs = ((value, index) for index, node in enumerate(model.graph) for value in node.outputs)
        return cls({value.name: index for value, index in outputs if value.name})

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Reorder the main graph's nodes."""
        graph = model.graph
        nodes = list(graph)
        makers = {node: makers_of(node) for node in nodes}
        places = self._places(makers)
        indices = {node: index for index, node in enumerate(nodes)}
        sorter = TopologicalSorter(makers)
        sorter.prepare()
        ready: list[tuple[int, int, ir.Node]] = []
        order: list[ir.Node] = []
        while sorter.is_active():
            for node in sorter.get_ready():
                heapq.heappush(ready, (places[node], indices[node], node))
            _, _, node = heapq.heappop(ready)
            order.append(node)
            sorter.done(node)
        if order == nodes:
            return ir.passes.PassResult(model, False)
        graph.remove(nodes)
        graph.extend(order)
        return ir.passes.PassResult(model, True)

    def _places(self, makers: Mapping[ir.Node, Set[ir.Node]]) -> dict[ir.Node, int]:
        places: dict[ir.Node, int] = {}
        for node, reads in makers.items():  # in a topological order, so each input's maker has its place
            known = [self.places[name] for value in node.outputs if (name := value.name) and name in self.places]
            places[node] = max(known or (places[maker] for maker in reads), default=0)
        return places
