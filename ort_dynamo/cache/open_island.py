"""Opens an island: the session of an equal one in this process, or a stored one, or one that is built."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch.fx import GraphModule

from ort_dynamo.cache.disk import DiskCache, Miss, disk_key
from ort_dynamo.cache.kernel_files import kernel_files
from ort_dynamo.cache.memory import MemoryCache
from ort_dynamo.graph.build import BuildSpec, BuildStage, BuiltGraph, Source
from ort_dynamo.graph.graph_key import GraphKey, graph_key
from ort_dynamo.graph.source_line import covered_modules, describe
from ort_dynamo.lowering.build_island import build_island
from ort_dynamo.program.progress import stage
from ort_dynamo.runtime.compiled_graph import CompiledGraph, open_graph
from ort_dynamo.runtime.installed.capabilities import runtime_facts

__all__ = ["CACHE", "OpenedIsland", "open_island"]

CACHE: MemoryCache[CompiledGraph] = MemoryCache(size=attrgetter("built.nbytes"), keep=attrgetter("built.keyable"))
"""The compiled graphs of this process, by graph key."""

_log = logging.getLogger(__name__)  # TORCH_LOGS=+ort_dynamo shows it
_SOURCES: Mapping[Source, str] = {"memory": "found in memory", "disk": "read from the cache", "built": "compiled"}


@dataclass(frozen=True)
class OpenedIsland:
    """An island with its session, and where that comes from.

    Attributes:
        name: its name in errors and saved files.
        compiled: the compiled island.
        places: name of an ONNX node that data can stop -> where it comes from in this island, since equal islands
            share a session.
        covers: the modules and the graph that it belongs to, such as "layers.0 to layers.3 (forward)".
        key: its graph key; None if it has none.
        stored_at: its key on disk; None if it is not on disk.
        source: "memory" if this process has opened one with the same graph key, "disk" if it was stored, or "built".
        miss: the reason of the cache miss; "" if it was not built.
        seconds: the time to build and open it, or to find it.
    """

    name: str
    compiled: CompiledGraph
    places: Mapping[str, str]
    covers: str
    key: GraphKey | None
    stored_at: str | None
    source: Source
    miss: str
    seconds: float


def open_island(
    island: GraphModule,
    spec: BuildSpec,
    role: str,
    *,
    functions: Mapping[str, Callable[..., Any]],
    cache: DiskCache | None,
    reads: bool = True,
    built: Callable[[BuildStage], None] = lambda stage: None,
) -> OpenedIsland:
    """Open an island from memory, else from disk, else build it.

    Args:
        island: its graph.
        spec: everything else that decides the result.
        role: the role of its graph, for its name.
        functions: role -> function of the program that decides the result.
        cache: the stored islands and kernels; None if nothing is stored.
        reads: whether a stored island may be used. An island that is saved or verified is built each time.
        built: called at each stage of a build.

    Raises:
        As `build_island` and `open_graph` do.
    """
    begin = time.perf_counter()
    key = graph_key(island, spec, functions=functions)
    stored = cache if reads and key is not None else None
    place = disk_key(key, runtime_facts()) if stored is not None and key is not None else ""
    name = f"{role}-{key or 'unkeyed'}"
    source: Source = "memory"
    miss = ""

    def opened(graph: BuiltGraph) -> CompiledGraph:
        return open_graph(graph, target=spec.target, device=spec.device, store=kernel_files(cache))

    def make() -> CompiledGraph:
        nonlocal source, miss
        found: CompiledGraph | Miss = Miss("unkeyed" if key is None else "off")
        with nullcontext() if stored is None else stored.locked(place):
            if stored is not None:
                found = stored.load(place, name, spec, opened)
            if not isinstance(found, Miss):
                source = "disk"
                return found
            source, miss = "built", found.reason
            graph = build_island(island, spec, name, built)
            stage("starting an ONNX Runtime session")
            compiled = opened(graph)
            if stored is not None:
                stored.store(place, graph)
            return compiled

    compiled = CACHE.get_or_build(key, make)
    seconds = time.perf_counter() - begin
    if _log.isEnabledFor(logging.DEBUG):
        operators = sum(node.op == "call_function" for node in island.graph.nodes)
        why = f" (cache miss: {miss})" if miss else ""
        _log.debug("island %s: %d operators, %s%s, %.2f s", name, operators, _SOURCES[source], why, seconds)
    return OpenedIsland(
        name=name,
        compiled=compiled,
        places=_places(island, compiled.built),
        covers=f"{covered_modules(island.graph.nodes)} ({role})",
        key=key,
        stored_at=place if stored is not None and stored.holds(place) else None,
        source=source,
        miss=miss,
        seconds=seconds,
    )


def _places(island: GraphModule, built: BuiltGraph) -> dict[str, str]:
    nodes = list(island.graph.nodes)
    return {name: describe(nodes[index]) for name, index in built.origins.items() if index < len(nodes)}
