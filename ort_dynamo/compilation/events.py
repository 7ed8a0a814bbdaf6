"""The events of a compile, for everything beside it: records, saved files, ranks, CUDA graphs, torch's cache.

To add one, subclass `Listener`, and name it in `backend.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.cache.open_island import OpenedIsland
from ort_dynamo.compilation.cut import PartitionRecord
from ort_dynamo.graph.build import BuildSpec, BuildStage, PassRecord
from ort_dynamo.graph.node_origins import NodeOrigins
from ort_dynamo.graph.serialized_graph import SerializedGraph
from ort_dynamo.segment.segment import Segmented
from ort_dynamo.targets.target import Target

__all__ = ["EXTRA_LISTENERS", "BoxedRun", "GraphCompilation", "Listener", "Listeners", "observed", "open_islands"]

BoxedRun = Callable[[list[Any]], Any]
"""Runs a graph on one list of inputs, which it empties."""


@dataclass
class GraphCompilation:
    """One forward, backward or inference graph on its way to sessions; each stage fills in its part.

    Attributes:
        gm: the functional ATen graph.
        role: "forward", "backward", "inference" or "training" (a whole step).
        seen: the outputs that the program sees.
        device: the device of its sessions.
        target: the target of its sessions.
        segmented: its islands, and the outer graph around them.
        spec: everything that decides how islands are built. A listener may change it until they are opened.
        functions: functions of the program that decide it, too.
        opening: the island that is being opened, or was last.
        islands: the islands, by their names in the outer graph.
        whole: the graph as plain values, before it was cut into islands; set at the end.
        origins: the modules and lines that its nodes come from; set at the end.
        passes: the passes that ran on this graph alone.
        not_recorded: why it is not recorded in a CUDA graph although the option asks for it; else "".
    """

    gm: GraphModule
    role: str
    seen: slice
    device: torch.device
    target: Target
    segmented: Segmented = field(init=False)
    spec: BuildSpec = field(init=False)
    functions: Mapping[str, Callable[..., Any]] = field(init=False)
    opening: GraphModule = field(init=False)
    islands: dict[str, OpenedIsland] = field(init=False)
    whole: SerializedGraph = field(init=False)
    origins: NodeOrigins = field(init=False)
    passes: tuple[PassRecord, ...] = ()
    not_recorded: str = ""


class Listener:
    """Hears of one compile; a subclass defines the events that it needs."""

    def traced(self, gm: GraphModule) -> None:
        """Hear that a joint or inference graph has been traced; no pass has run on it."""

    def cut(self, graphs: Mapping[str, GraphModule], partition: PartitionRecord | None) -> None:
        """Hear that a joint graph has been cut, or that an inference graph has been marked.

        Args:
            graphs: role -> graph.
            partition: the record of the cut; None of an inference graph.
        """

    def begun(self, graph: GraphCompilation) -> None:
        """Hear that the compile of a graph begins."""

    def segmented(self, graph: GraphCompilation) -> None:
        """Hear that a graph has its islands, and how these are to be built."""

    def built(self, stage: BuildStage) -> None:
        """Hear of a stage of an island's build; of one that is found in a cache there is none."""

    def failed(self, graph: GraphCompilation, error: Exception) -> bool:
        """Hear that the islands of a graph could not be opened; say whether to try again, with another `graph.spec`."""
        return False

    def opened(self, graph: GraphCompilation) -> None:
        """Hear that all islands of a graph are open, and that its outer graph is whole."""

    def finished(self, graph: GraphCompilation, run: BoxedRun) -> BoxedRun:
        """Handle a graph that can run; return the callable to run instead, or `run`."""
        return run


class Listeners(Listener):
    """Several listeners that all get each event, in order."""

    def __init__(self, *listeners: Listener) -> None:
        self._all: Sequence[Listener] = listeners

    def traced(self, gm: GraphModule) -> None:  # noqa: D102
        for one in self._all:
            one.traced(gm)

    def cut(self, graphs: Mapping[str, GraphModule], partition: PartitionRecord | None) -> None:  # noqa: D102
        for one in self._all:
            one.cut(graphs, partition)

    def begun(self, graph: GraphCompilation) -> None:  # noqa: D102
        for one in self._all:
            one.begun(graph)

    def segmented(self, graph: GraphCompilation) -> None:  # noqa: D102
        for one in self._all:
            one.segmented(graph)

    def built(self, stage: BuildStage) -> None:  # noqa: D102
        for one in self._all:
            one.built(stage)

    def failed(self, graph: GraphCompilation, error: Exception) -> bool:  # noqa: D102
        again = [one.failed(graph, error) for one in self._all]  # all of them get the event
        return any(again)

    def opened(self, graph: GraphCompilation) -> None:  # noqa: D102
        for one in self._all:
            one.opened(graph)

    def finished(self, graph: GraphCompilation, run: BoxedRun) -> BoxedRun:  # noqa: D102
        for one in self._all:
            run = one.finished(graph, run)
        return run


EXTRA_LISTENERS: list[Callable[[], Listener]] = []
"""Each makes a listener for each compile of the process. While there are some, no compile takes a trace from torch's
cache, so that all events come."""


@contextmanager
def observed(make: Callable[[], Listener]) -> Iterator[None]:
    """Have one more listener made for each compile while this is open."""
    EXTRA_LISTENERS.append(make)
    try:
        yield
    finally:
        EXTRA_LISTENERS.remove(make)


def open_islands(
    graph: GraphCompilation,
    open_island: Callable[[GraphModule, GraphCompilation], OpenedIsland],
    listener: Listener,
) -> dict[str, OpenedIsland]:
    """Open all islands of a graph, and once more each time that the listener has changed how.

    Raises:
        As `open_island` does, where the listener has no other way.
    """
    while True:
        opened = {}
        try:
            for name, island in graph.segmented.islands.items():
                graph.opening = island
                opened[name] = open_island(island, graph)
        except Exception as error:
            if not listener.failed(graph, error):
                raise
        else:
            return opened
