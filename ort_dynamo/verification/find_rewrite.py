"""Finds the first pass that changes the results of an FX graph, by running the graph in torch before and after it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from ort_dynamo.graph.marks import HALF
from ort_dynamo.graph.node_origins import operator_name
from ort_dynamo.graph.source_line import module_path, user_line
from ort_dynamo.passes.rewrites import Rewrite
from ort_dynamo.testing import copied
from ort_dynamo.torch_internals.pytree import tree_leaves
from ort_dynamo.verification.compare import first_problem, largest
from ort_dynamo.verification.in_double import InDouble
from ort_dynamo.verification.models import plainly
from ort_dynamo.verification.record import GraphRun, random_states_set
from ort_dynamo.verification.result import Fault

__all__ = ["find_rewrite"]

_log = logging.getLogger(__name__)


def find_rewrite(rewrites: Sequence[Rewrite], runs: Sequence[GraphRun]) -> Fault | None:
    """Find the first change of an FX graph after which it computes something else.

    Args:
        rewrites: the changes of the graphs of one compile, in order. A joint graph takes the inputs of its forward and
            the gradients that its backward takes.
        runs: the runs of its graphs, in order; the first of each graph gives the inputs.
    """
    if not runs:
        return None  # the graph was compiled and did not run
    given: dict[str, Any] = {}
    for run in reversed(runs):
        names = [node.name for node in run.graph.gm.graph.find_nodes(op="placeholder")]
        given |= dict(zip(names, run.inputs, strict=True))
    for rewrite in rewrites:
        inputs = [_inputs(gm, given) for gm in (rewrite.before, rewrite.after)]
        if inputs[0] is None or inputs[1] is None:
            continue  # what the cut saves under another name
        with random_states_set(runs[0].generators):
            before = _Values(rewrite.before, inputs[0])
        with random_states_set(runs[0].generators):
            after = _Values(rewrite.after, inputs[1])
        if problem := after.problem(before):
            return _fault(rewrite, before, after, problem)
    return None


def _inputs(gm: GraphModule, given: Mapping[str, Any]) -> list[Any] | None:
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    return [copied(given[name]) for name in names] if all(name in given for name in names) else None


class _Values(Interpreter):
    """The values of a graph's nodes in torch, and in float64.

    Attributes:
        values: name of a node -> its value, and that in float64.
        results: the results of the graph, and those in float64; None if torch cannot run it.
    """

    def __init__(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__(gm)
        self.values: dict[str, tuple[Any, Any]] = {}
        self.results: tuple[Sequence[Any], Sequence[Any]] | None = None
        self._mode = InDouble()
        try:
            with plainly(), self._mode:
                results = tree_leaves(self.run(*inputs))
        except Exception:  # between two passes a graph need not run: the last of them makes it whole
            _log.debug("a graph between two passes does not run in torch", exc_info=True)
        else:
            self.results = results, [self._mode.read(one) for one in results]

    def run_node(self, n: Node) -> Any:
        """Run a node, and keep its value."""
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, torch.Tensor):
            self.values[n.name] = value.clone(), self._mode.read(value)
        return value

    def problem(self, before: _Values) -> str:
        """Say how the results differ from those before the pass; nothing if they do not, or if torch has none."""
        if self.results is None or before.results is None:
            return ""
        (found, _), (expected, exact) = self.results, before.results
        if len(found) != len(expected):
            return ""  # a pass may save more
        return first_problem(found, expected, lambda: exact, scale=largest(expected))

    def first_wrong(self, before: _Values) -> tuple[Node, str] | None:
        """Find the first node whose value is not that of the node of its name before the pass."""
        for node in self.module.graph.nodes:  # type: ignore[union-attr]
            if node.name not in self.values or node.name not in before.values:
                continue
            (found, _), (expected, exact) = self.values[node.name], before.values[node.name]
            if found.shape != expected.shape:
                continue  # a pass may give a name to a value of another shape
            if problem := first_problem([found], [expected], partial(list, [exact])):
                return node, problem
        return None


def _fault(rewrite: Rewrite, before: _Values, after: _Values, problem: str) -> Fault:
    wrong = after.first_wrong(before)
    node, problem = (None, problem) if wrong is None else wrong
    return Fault(
        operator="" if node is None else operator_name(node),
        node="" if node is None else node.name,
        graph="joint" if node is None else node.meta.get(HALF, "is_forward").removeprefix("is_"),
        module="" if node is None else module_path(node),
        line="" if node is None else user_line(node),
        problem=problem,
        culprit="pass",
        cause=f"the pass {rewrite.name}, which rewrites the FX graph",
    )
