"""Records the inputs and results of compiled graphs and of their islands, when it is asked to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.compilation.events import BoxedRun, GraphCompilation, Listener
from ort_dynamo.runtime.boxed import Island
from ort_dynamo.runtime.compiled_graph import CompiledGraph
from ort_dynamo.runtime.outer_code import IslandCall
from ort_dynamo.testing import copied
from ort_dynamo.torch_internals.pytree import tree_map

__all__ = ["GraphRun", "IslandRun", "Recorder", "random_states_set"]


@dataclass(frozen=True)
class IslandRun:
    """One run of an island.

    Attributes:
        graph: the graph that it is a part of.
        name: its name there.
        compiled: the compiled island that ran.
        inputs, outputs: copies of its values.
    """

    graph: GraphCompilation
    name: str
    compiled: CompiledGraph
    inputs: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...]

    @property
    def gm(self) -> GraphModule:
        """The FX graph of the island."""
        return self.graph.segmented.islands[self.name]


@dataclass
class GraphRun:
    """One run of a graph.

    Attributes:
        graph: the graph.
        inputs, outputs: copies of its values.
        generators: device, the CPU and the graph's -> the state of torch's generator when it began.
        islands: the runs of its islands, in order.
    """

    graph: GraphCompilation
    inputs: list[Any]
    generators: Mapping[torch.device, torch.Tensor]
    outputs: tuple[Any, ...] = ()
    islands: list[IslandRun] = field(default_factory=list)


class Recorder(Listener):
    """Records the runs of all graphs of one compile, from `with recording()` to its end.

    Attributes:
        graphs: the graphs compiled so far.
        runs: the runs recorded so far, in order.
    """

    def __init__(self) -> None:
        self.graphs: list[GraphCompilation] = []
        self.runs: list[GraphRun] = []
        self._records = False
        self._closed = False

    def close(self) -> None:
        """Let go of all graphs and runs, and record no more: compiled graphs keep the recorder."""
        self.graphs, self.runs, self._closed = [], [], True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs."""
        self._records, self.runs = True, []
        try:
            yield
        finally:
            self._records = False

    def opened(self, graph: GraphCompilation) -> None:
        """Put something around each island."""
        if self._closed:
            return
        self.graphs.append(graph)
        number = len(self.graphs) - 1
        outer = graph.segmented.gm
        for name, island in list(outer.named_children()):
            if isinstance(island, Island):
                outer.set_submodule(name, _Recorded(island, self._record(number, name, island.compiled)))

    def finished(self, graph: GraphCompilation, run: BoxedRun) -> BoxedRun:
        """Put something around the graph."""
        if self._closed:
            return run
        number = next(number for number, one in enumerate(self.graphs) if one is graph)

        def recorded(given: list[Any]) -> Any:
            if not self._records:
                return run(given)
            now = GraphRun(self.graphs[number], [copied(one) for one in given], _states(self.graphs[number].device))
            self.runs.append(now)
            results = run(given)
            now.outputs = tuple(tree_map(_kept, results))
            return results

        recorded._boxed_call = True  # type: ignore[attr-defined]
        return recorded

    def _record(self, number: int, name: str, compiled: CompiledGraph) -> Callable[..., Any]:
        def note(run: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*values: Any) -> Any:
                if not self._records:
                    return run(*values)
                inputs = tuple(copied(one) for one in values)
                outputs = run(*values)
                kept = tuple(map(_kept, outputs))
                self.runs[-1].islands.append(IslandRun(self.graphs[number], name, compiled, inputs, kept))
                return outputs

            return recorded

        return note


class _Recorded(Island):
    """An island whose runs are noted."""

    def __init__(self, island: Island, note: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__(island.compiled, {})
        self._call, self._note = island.as_call(), note

    def as_call(self) -> IslandCall:
        """Give the island's call, with its run noted."""
        call = self._call
        return dataclasses.replace(call, run=self._note(call.run))


def _states(device: torch.device) -> dict[torch.device, torch.Tensor]:
    states = {torch.device("cpu"): torch.get_rng_state()}
    return states if device.type == "cpu" else {**states, device: torch.get_device_module(device).get_rng_state(device)}


@contextmanager
def random_states_set(states: Mapping[torch.device, torch.Tensor]) -> Iterator[None]:
    """Have torch draw random numbers from recorded states, and put its own back."""
    with torch.random.fork_rng(()), ExitStack() as stack:
        for device, state in states.items():
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                stack.enter_context(torch.random.fork_rng((device,), device_type=device.type))
                torch.get_device_module(device).set_rng_state(state, device)
        yield


def _kept(value: Any) -> Any:
    return copied(value.detach()) if isinstance(value, torch.Tensor) else value
