"""A compiled graph as torch's own cache stores it: the outer graph, with its islands by key.

torch writes it to its own folder and unpickles it from there, as it does for inductor. The models of the islands are
in the cache of compiled graphs, which unpickles nothing. If one of them is missing, torch compiles the whole graph.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.cache.disk import DiskCache, context_key, disk_cache, disk_key
from ort_dynamo.cache.entry import Entry
from ort_dynamo.cache.kernel_files import kernel_files
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.compilation.cut import PartitionRecord
from ort_dynamo.compilation.events import BoxedRun
from ort_dynamo.graph.build import Source
from ort_dynamo.graph.graph_key import GraphKey
from ort_dynamo.graph.node_origins import NodeOrigins
from ort_dynamo.graph.serialized_graph import SerializedGraph, spelled
from ort_dynamo.options.groups import CacheOptions, SessionSettings
from ort_dynamo.report.counts import report
from ort_dynamo.report.record import RECORDS, CompileRecord, GraphRecord
from ort_dynamo.runtime.arena import ARENA
from ort_dynamo.runtime.boxed import Island, boxed
from ort_dynamo.runtime.compiled_graph import CompiledGraph, open_graph
from ort_dynamo.runtime.in_torch import InTorch
from ort_dynamo.runtime.installed.capabilities import runtime_facts
from ort_dynamo.runtime.installed.providers import usable_target
from ort_dynamo.torch_internals.aot_cache import BypassError, CacheMissError, IslandMissError, OutputCode
from ort_dynamo.torch_internals.tracing.frames import current_compile_id

__all__ = ["LOADING", "IslandPlace", "Loading", "StoredCode"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=+ort_dynamo shows it


@dataclass(frozen=True)
class Loading:
    """The source of the islands of a graph that torch has stored, and the receiver of its records.

    Attributes:
        disk: the stored graphs.
        record: called with the record of a graph's compile, and, of a forward, the record of its joint graph's cut.
        graphs: the records of all graphs of the compile; a RunWatch sees them when one of the graphs runs.
    """

    disk: DiskCache
    record: Callable[[GraphRecord, PartitionRecord | None], None]
    graphs: Sequence[GraphRecord]


_CONTEXT = "_context"
"""The key of a state: its digest of the runtime, the machine and our sources. A graph may have no island to tell."""

LOADING: ContextVar[Loading | None] = ContextVar("LOADING", default=None)
"""Set while a graph is traced whose result AOTAutograd may have stored."""


@dataclass(frozen=True)
class IslandPlace:
    """The place of a stored island, and the facts for opening it.

    Attributes:
        key: its graph key.
        place: its key on disk.
        session: the settings of its session, unless its entry has others.
        in_order: whether its nodes run in the model's order.
        device: the device of its tensors.
        places: name of an ONNX node that data can stop -> where it comes from in the user's code.
        covers: the modules and the graph that it belongs to.
    """

    key: GraphKey
    place: str
    session: SessionSettings
    in_order: bool
    device: torch.device
    places: Mapping[str, str]
    covers: str


class StoredCode(OutputCode):
    """Runs a compiled graph; AOTAutograd calls it with a list of inputs, which it clears.

    Args:
        outer: the outer graph, with its islands.
        whole: the graph before it was cut into islands.
        origins: the modules and lines that its nodes come from.
        islands: the places where they are stored. If one is None, the graph is not stored.
        record: the record of the compile.
        partition: the record of the partition, if the graph is a forward.
        cache: the cache to find the islands in, outside of this project's compiles.
        run: the function that runs the graph; it is not stored.
    """

    def __init__(
        self,
        outer: GraphModule,
        whole: SerializedGraph,
        origins: NodeOrigins,
        islands: Mapping[str, IslandPlace | None],
        record: GraphRecord,
        partition: PartitionRecord | None,
        cache: CacheOptions,
        run: BoxedRun,
    ) -> None:
        around = None if None in islands.values() or not whole.is_storable else spelled(outer)
        self._outer = around if around and around.is_storable and not around.subgraphs else None
        self._whole = whole
        self._origins = origins
        self._islands = dict(islands)
        self._record = record
        self._partition = partition
        self._cache = cache
        self._entries: dict[str, Entry] | None = {}
        self._run: BoxedRun | None = run
        self._boxed_call = True  # of this object, from which torch's wrappers copy it

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Run the graph."""
        assert self._run is not None
        return self._run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Drop all that a pickle cannot hold."""
        if self._outer is None:
            raise BypassError("a node or an island of the graph cannot be stored")
        self._run = self._entries = None

    def __getstate__(self) -> dict[str, Any]:
        """Give the pickled state: it leaves out the islands' models."""
        entries: dict[str, Entry] | None = None if self._run is None else {}
        return {**self.__dict__, "_entries": entries, _CONTEXT: context_key((), runtime_facts())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Find the islands of an unpickled graph.

        This is the one place where torch takes an error for a miss, for any reader: AOTAutograd, or Dynamo's
        precompile, which knows nothing of our key.

        Raises:
            IslandMissError: one is not there, or not for this runtime, machine or state of our sources.
        """
        if state.pop(_CONTEXT, None) != context_key((), runtime_facts()):
            raise IslandMissError("a stored graph is of another runtime, machine or release of ort_dynamo")
        self.__dict__.update(state)
        if self._entries is None:
            disk = self._loading().disk
            self._entries = {name: _entry(place, disk) for name, place in self._islands.items() if place is not None}

    def __deepcopy__(self, _: dict[int, Any]) -> StoredCode:
        """Return a copy that shares all; torch stores one to write it again."""
        copied = StoredCode.__new__(StoredCode)
        copied.__dict__.update(self.__dict__)
        return copied

    def post_compile(self, *_: Any) -> None:
        """Make an unpickled graph run again: torch calls this when it has found it."""
        loading = self._loading()
        if self._outer is None or self._entries is None:
            raise CacheMissError
        if self._partition is not None:
            ARENA.expect(self._partition.memory.peak)
        found = {
            name: _opened(place, self._entries[name], loading.disk)
            for name, place in self._islands.items()
            if place is not None
        }
        modules = {name: island for name, (island, _) in found.items()}
        outer, whole = self._outer.module(modules), InTorch(self._whole)
        self._run = boxed(outer, loading.graphs, in_torch=whole, origins=self._origins)
        self._entries = {}
        islands = tuple(
            dataclasses.replace(island, source=source, miss="", seconds=0.0)
            for island, (_, source) in zip(self._record.islands, found.values(), strict=True)
        )
        _log.debug("%s graph: read from torch's cache, with %d island(s)", self._record.role, len(islands))
        loading.record(dataclasses.replace(self._record, islands=islands, seconds=0.0), self._partition)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There is none."""

    def _loading(self) -> Loading:
        loading = LOADING.get()
        if loading is not None:
            return loading
        disk = disk_cache(self._cache)
        if disk is None:
            raise CacheMissError
        graphs: list[GraphRecord] = []
        return Loading(disk, partial(_record_alone, graphs), graphs)


def _record_alone(graphs: list[GraphRecord], graph: GraphRecord, partition: PartitionRecord | None) -> None:
    """Record a graph that came without a compile."""
    graphs.append(graph)
    report(graph)
    RECORDS.begin()(CompileRecord(partition, (graph,), 0.0, current_compile_id()))


def _entry(place: IslandPlace, disk: DiskCache) -> Entry:
    if place.place != disk_key(place.key, runtime_facts()):
        raise IslandMissError(
            "an island was compiled for another runtime or machine, or by another version of ort_dynamo"
        )
    entry = disk.load_entry(place.place)
    if not isinstance(entry, Entry):
        raise IslandMissError(f"the cache of compiled graphs has no usable entry of an island: {entry.reason}")
    return entry


def _opened(place: IslandPlace, entry: Entry, disk: DiskCache) -> tuple[Island, Source]:
    source: list[Source] = []

    def make() -> CompiledGraph:
        source.append("disk")
        built = entry.built(entry.name, place.session, in_order=place.in_order)
        return open_graph(built, usable_target(place.device.type), place.device, kernel_files(disk))

    compiled = CACHE.get_or_build(place.key, make)
    return Island(compiled, place.places, place.covers), source[0] if source else "memory"
