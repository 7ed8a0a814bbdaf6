"""Run operators in torch that are several times slower in ONNX Runtime, if that pays for the boundary."""

from __future__ import annotations

import operator
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import CHOSEN, RANDOM
from ort_dynamo.passes.fx.analysis.views import is_remakable_view
from ort_dynamo.passes.fx.torch_graph.mark_chosen import choose
from ort_dynamo.passes.fx.torch_graph.slower_operators import FORMS
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.prices import OperatorPrices
from ort_dynamo.targets.target import Target
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = ["PlaceSlowerOperators"]

SUBSTITUTES = "torch substitutes, and ONNX Runtime multiplies by an inverse, whose error is larger"
"""The reason of systems of triangles."""

FILLS = "creates a constant tensor; torch runs the rest of this graph"

_LIKE = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default)
"""Operators that read nothing of their input but its shape."""


@ordering(needs=[Condition.WHOLE_KERNELS_PLACED], gives=[Condition.PLACED])
@dataclass(frozen=True)
class PlaceSlowerOperators(PassBase):
    """Marks nodes of the table of slower operators that gain more in torch than the boundary costs, with the ratio.

    Systems of triangles always run in torch: a session has no substitution, so its error is larger.

    The gain is the table's price times the elements, by the example's sizes. The cost is that of a boundary. With
    several threads, torch's threads also keep spinning for milliseconds, while a later session needs the cores. There
    is no such cost if no session follows, as for an embedding's gradient that is a result. There is no cost at all if
    torch runs all operators that compute.

    Some nodes only fill a tensor, such as the zeros that the gradients of gather and index_select are added to. They
    run in torch if only such nodes read them, or if torch runs the rest of the graph.

    Attributes:
        target: the target of the sessions.
        threads: the number of threads of a session.
    """

    target: Target
    threads: int
    name: str = "place_slower_operators"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Mark nodes of a joint or inference graph."""
        systems = graph_module.graph.find_nodes(op="call_function", target=aten.linalg_solve_triangular.default)
        placed = choose(systems, SUBSTITUTES)
        prices = self.target.prices.operators
        if prices is None or not self.target.facts.has_slower_operators:
            return PassResult(graph_module, placed)
        graph = graph_module.graph
        slower = {node for node in graph.nodes if node.target in prices.slower and FORMS[node.target].takes(node)}
        if not slower:
            return PassResult(graph_module, placed)
        alone = not any(
            _is_the_sessions(node) for node in graph.nodes if node not in slower and not _reads_no_data(node)
        )
        leads: set[Node] = set()  # to a session: one of its nodes is among those that depend on it
        modified = placed
        for node in reversed(graph.nodes):
            if any(user in leads or _is_the_sessions(user) for user in node.users):
                leads.add(node)
            if CHOSEN in node.meta:
                continue
            if node in slower and (alone or self._gain(node, prices) > self._cost(node, prices, node in leads)):
                node.meta[CHOSEN] = f"ONNX Runtime takes {prices.slower[node.target].ratio:g} times as long"
                modified = True
            elif _fills(node, {user for user in node.users if CHOSEN in user.meta}) or (
                alone and _is_the_sessions(node)
            ):
                node.meta[CHOSEN] = FILLS
                modified = True
        return PassResult(graph_module, modified)

    def _gain(self, node: Node, prices: OperatorPrices) -> float:
        return _elements(node) * prices.slower[node.target].saved / self.threads  # type: ignore[index]

    def _cost(self, node: Node, prices: OperatorPrices, session_follows: bool) -> float:
        crossing = _elements(node) * prices.crossing / self.threads
        contends = session_follows and self.threads > 1 and self.target.facts.shares_the_processor
        return prices.cut + crossing + contends * prices.spinning


def _elements(node: Node) -> int:
    return FORMS[node.target].counts(node)  # type: ignore[index]


def _is_the_sessions(node: Node) -> bool:
    """Check whether a node computes a tensor that torch has no reason to compute."""
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and not is_remakable_view(node)
        and CHOSEN not in node.meta
        and RANDOM not in node.meta
        and not isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))
    )


def _fills(node: Node, readers: Set[Node]) -> bool:
    """Check whether a node makes a tensor from no other tensor, and only `readers` read it."""
    return _is_the_sessions(node) and _reads_no_data(node) and bool(node.users) and node.users.keys() <= readers


def _reads_no_data(node: Node) -> bool:
    return not node.all_input_nodes or node.target in _LIKE
