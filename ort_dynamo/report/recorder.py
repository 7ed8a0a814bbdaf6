"""Records one compile, counts where its nodes run, and logs each new message."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from torch.fx import GraphModule

from ort_dynamo.compilation.cut import PartitionRecord
from ort_dynamo.compilation.events import GraphCompilation, Listener
from ort_dynamo.report.counts import report, report_first, report_not_recorded
from ort_dynamo.report.record import RECORDS, CompileRecord, GraphRecord, IslandRecord
from ort_dynamo.torch_internals.tracing.frames import current_compile_id

__all__ = ["Records", "graph_record"]


class Records(Listener):
    """The records of one compile, from its begin.

    Attributes:
        graphs: the records of the graphs compiled so far.
        partition: the record of the partition; None if there are no gradients.
    """

    def __init__(self) -> None:
        self.graphs: list[GraphRecord] = []
        self.partition: PartitionRecord | None = None
        self._read: list[tuple[GraphRecord, PartitionRecord | None]] = []
        self._begin, self._keep = time.perf_counter(), RECORDS.begin()
        self._graph_begin = self._begin

    def cut(self, graphs: Mapping[str, GraphModule], partition: PartitionRecord | None) -> None:
        """Keep the record of the cut."""
        self.partition = partition

    def begun(self, graph: GraphCompilation) -> None:
        """Take the time."""
        self._graph_begin = time.perf_counter()

    def opened(self, graph: GraphCompilation) -> None:
        """Count where the nodes of a graph run, and record it."""
        record = graph_record(graph, time.perf_counter() - self._graph_begin)
        report(record)
        self.graphs.append(record)
        report_not_recorded(graph.role, graph.not_recorded)

    def read(self, graph: GraphRecord, partition: PartitionRecord | None) -> None:
        """Keep the record of a graph that torch's cache had; it counts if the compile takes none but such graphs."""
        self._read.append((graph, partition))

    def close(self, saved: Path | None = None) -> CompileRecord:
        """Give the record of the compile, and keep it with those of the process.

        Args:
            saved: the JSON file that describes how its saved models connect.
        """
        if not self.graphs:  # a forward that was read without its backward does not count
            for graph, cut in self._read:
                self.graphs.append(graph)
                self.partition = self.partition or cut
                report(graph)
        seconds = time.perf_counter() - self._begin
        record = CompileRecord(self.partition, tuple(self.graphs), seconds, current_compile_id(), saved)
        self._keep(record)
        report_first(record.graphs)
        return record


def graph_record(graph: GraphCompilation, seconds: float) -> GraphRecord:
    """Make the record of a graph whose islands are open.

    Args:
        graph: the graph.
        seconds: the time of its compile.
    """
    found = graph.segmented
    islands = (
        IslandRecord(one.name, one.source, one.compiled.built.record, one.seconds, one.miss)
        for one in graph.islands.values()
    )
    return GraphRecord(
        role=graph.role,
        native=found.native,
        by_design=found.by_design,
        chosen=found.chosen,
        eager=found.eager,
        islands=tuple(islands),
        passes=graph.passes,
        seconds=seconds,
        not_recorded=graph.not_recorded,
        modules=found.modules,
    )
