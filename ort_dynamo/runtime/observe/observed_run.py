"""Run an outer graph so that each value of it, and each inside its islands, is shown to observers.

The results are those of the sessions that run anyway. The values inside an island come from a second session, which has
the same nodes and gives these values as its results.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Graph, GraphModule, Node

from ort_dynamo.graph.node_origins import IslandNodes, NodeOrigins
from ort_dynamo.graph.serialized_graph import SerializedGraph, spelled
from ort_dynamo.runtime.compiled_graph import CompiledGraph
from ort_dynamo.runtime.generated_code import generate_function
from ort_dynamo.runtime.outer_code import IslandCall, outer_code
from ort_dynamo.runtime.streams import is_recorded
from ort_dynamo.torch_internals.kernels.operators import aten, is_view, is_wait
from ort_dynamo.torch_internals.kernels.undefined import UNDEFINED
from ort_dynamo.torch_internals.tracing.wrappers import are_plain

__all__ = ["ObservedGraph", "Show", "forget_sessions"]

Show = Callable[[int, torch.Tensor], None]
"""Takes the index of a node, as in NodeOrigins, and its value, which is written over later."""

_log = logging.getLogger(__name__)

_sessions: WeakKeyDictionary[CompiledGraph, tuple[CompiledGraph, tuple[int, ...]] | None] = WeakKeyDictionary()
_lock = threading.Lock()


def _in_child() -> None:
    global _lock, _sessions
    _lock, _sessions = threading.Lock(), WeakKeyDictionary()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)


def forget_sessions() -> None:
    """Close the sessions that give values inside islands."""
    with _lock:
        _sessions.clear()


class ObservedGraph:
    """A graph, and the function that shows its values. Its code is written at the first run that is observed.

    Args:
        gm: the outer graph.
        whole: the graph before it was cut into islands.
        origins: where its nodes come from.
        islands: the compiled islands by name, and how each is called.
    """

    def __init__(
        self,
        gm: GraphModule,
        whole: SerializedGraph,
        origins: NodeOrigins,
        islands: Mapping[str, tuple[CompiledGraph, IslandCall]],
    ) -> None:
        self.whole: SerializedGraph = whole
        self.origins: NodeOrigins = origins
        self._outer = spelled(gm)
        self._islands = islands
        self._run: Callable[[list[Any], Show], Any] | None = None
        self._hidden: frozenset[int] = frozenset()
        self._has_warned = False

    def can_show(self, given: Sequence[Any]) -> bool:
        """Check whether the inputs of a call are plain, and no CUDA graph is being recorded, which runs nothing."""
        return are_plain(given) and not is_recorded()

    def run(self, given: list[Any], observers: Sequence[Show]) -> Any:
        """Run the graph on `given`, which it empties, and show each node's value once.

        Not shown are values that nobody has defined yet: of `empty`, and of a collective that may still run.
        """
        if self._run is None:
            self._hidden = frozenset(_hidden(self.whole.module({}).graph))
            self._run = self._written()
        seen = set(self._hidden)

        def show(index: int, value: Any) -> None:
            if index in seen or not isinstance(value, torch.Tensor):
                return
            seen.add(index)
            with torch.no_grad():
                for observer in observers:
                    self._call(observer, index, value)

        return self._run(given, show)

    def _call(self, observer: Show, index: int, value: torch.Tensor) -> None:
        try:
            observer(index, value.detach())
        except Exception:
            self._warn_once(f"The value of {self.origins.nodes[index].name} was not observed")

    def _warn_once(self, message: str) -> None:
        """Log the exception that is being handled, once for each graph: an observer must not stop the program."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("%s; more of this %s graph may be missing.", message, self.origins.role, exc_info=True)

    def _written(self) -> Callable[[list[Any], Show], Any]:
        gm = self._outer.module({name: torch.nn.Identity() for name in self._islands})
        shown = {
            node: index
            for node, index in zip(gm.graph.nodes, self.origins.outer, strict=True)
            if index >= 0 and node.users and not _is_of_island(node, self._islands)
        }
        calls = {
            name: replace(call, run=_Shown(compiled, call.run, self.origins.islands[name], self._warn_once))
            for name, (compiled, call) in self._islands.items()
        }
        return generate_function("outer", *outer_code(gm, calls, shown))


_SCATTERS = (
    aten.as_strided_scatter.default,
    aten.diagonal_scatter.default,
    aten.index_put.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
)
"""Operators that define a part of their first argument's numbers."""


def _hidden(graph: Graph) -> Iterator[int]:
    """Give the indices of the nodes whose values are undefined, wholly or in part, or may not have arrived."""
    hidden: set[Node] = set()
    for node in filter(is_wait, graph.nodes):
        started = node.args[0]
        hidden.add(started)
        while is_view(started.target):
            started = started.args[0]
            hidden.add(started)
    for index, node in enumerate(graph.nodes):
        passes_on = is_view(node.target) or node.target in _SCATTERS
        if node in hidden or node.target in UNDEFINED or (passes_on and node.args[0] in hidden):
            hidden.add(node)
            yield index


def _is_of_island(node: Node, islands: Mapping[str, Any]) -> bool:
    """Check whether a node is the call of an island, which shows its results itself, or takes one of these out."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node.op == "call_module" and node.target in islands


class _Shown:
    """Runs an island, and shows its values."""

    def __init__(
        self,
        compiled: CompiledGraph,
        run: Callable[..., Any],
        island: IslandNodes,
        warn: Callable[[str], None],
    ) -> None:
        self._compiled, self._run, self._island, self._warn = compiled, run, island, warn

    def __call__(self, show: Show, *values: Any) -> tuple[torch.Tensor, ...]:
        results = self._run(*values)
        found = [*zip(self._island.results, results, strict=True), *self._inside(values)]
        for index, value in sorted(found, key=lambda pair: pair[0]):
            if index >= 0:
                show(index, value)
        return results

    def _inside(self, values: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
        """Compute the values inside, each with the index of its node; none if memory runs out."""
        try:
            with _lock:
                if self._compiled not in _sessions:
                    _sessions[self._compiled] = self._compiled.show()
                inside = _sessions[self._compiled]
            if inside is None:
                return []
            session, nodes = inside
            return list(zip((self._island.nodes[node] for node in nodes), session.run(*values), strict=True))
        except Exception:
            self._warn(f"The values inside of {self._compiled.built.name} were not observed")
            return []
