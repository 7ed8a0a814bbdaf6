"""Profile the ONNX nodes of sessions while torch's profiler records, and put them into torch's trace."""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import onnx

from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.graph.node_origins import NodeOrigin, NodeOrigins
from ort_dynamo.runtime.compiled_graph import CompiledGraph
from ort_dynamo.runtime.observe.profiled_run import NODE_SUFFIX, ProfiledGraph
from ort_dynamo.runtime.streams import is_recorded

__all__ = ["NodeProfile", "Span", "node_profile", "profile_nodes"]


_RUN = "model_run"
"""ONNX Runtime's event of a whole run."""


class Span(NamedTuple):
    """The span of a session.

    Attributes:
        name: its name, after "ort_train: ".
        compiled: the session.
        island: the name of its island in the outer graph.
        origins: the origins of the graph's nodes; None if they are not known.
    """

    name: str
    compiled: CompiledGraph
    island: str = ""
    origins: NodeOrigins | None = None


@dataclass(frozen=True)
class _Run:
    """One run of a session.

    Attributes:
        began: when, in nanoseconds since the epoch.
        thread: in which thread.
        is_whole: whether it came to its end.
    """

    began: int
    thread: int
    is_whole: bool


@dataclass
class _Profiled:
    graph: ProfiledGraph
    origins: dict[str, NodeOrigin]
    runs: list[_Run] = field(default_factory=list)


class NodeProfile:
    """The ONNX nodes that ran in a block of `profile_nodes`, to be written beside the events of torch's profiler."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._graphs: dict[CompiledGraph, _Profiled] = {}
        self._running = 0
        self._is_closed = False

    def export_chrome_trace(self, profiler: Any, path: str | os.PathLike[str]) -> None:
        """Write the events of torch's profiler, and those of the nodes inside the spans of their sessions, as one file.

        Args:
            profiler: the torch.profiler.profile that recorded the block, after its end.
            path: the file, for Perfetto or chrome://tracing. It is compressed if it ends in ".gz".
        """
        path = Path(path)
        profiler.export_chrome_trace(str(path))
        opened: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            trace = json.load(file)
        base = trace.get("baseTimeNanoseconds", 0) / 1e3
        trace["traceEvents"] += [{**one, "ts": one["ts"] - base} for one in self._events]
        with opened(path, "wt", encoding="utf-8") as file:
            json.dump(trace, file)

    def run(self, span: Span, run: Callable[..., Any], *values: Any) -> Any:
        """Run a session on some values with ONNX Runtime's profiler, and note the time.

        Args:
            span: the session, and the places that the values of its island come from.
            run: runs the session without a profile, for one that cannot be profiled.
            values: its inputs.
        """
        profiled = self._profiled(span)
        if profiled is None:
            return run(*values)
        began, is_whole = time.time_ns(), False
        try:
            results = profiled.graph.run(*values)
            is_whole = True
        finally:
            with self._changed:
                profiled.runs.append(_Run(began, threading.get_native_id(), is_whole))
                self._running -= 1
                self._changed.notify_all()
        return results

    def _profiled(self, span: Span) -> _Profiled | None:
        """Give the session that is to run in place of this one; its run is counted as running."""
        compiled, target = span.compiled, span.compiled.target
        if target is None or is_recorded():
            return None
        with self._changed:
            if self._is_closed:
                return None
            if compiled not in self._graphs:
                graph = ProfiledGraph(compiled.built, target, compiled.device)
                self._graphs[compiled] = _Profiled(graph, _node_origins(compiled.built, span))
            self._running += 1
            return self._graphs[compiled]

    def _close(self) -> None:
        """Read the profiles, after the runs that other threads have begun."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._running)
            graphs, self._graphs = self._graphs, {}
        for compiled, one in graphs.items():
            try:
                self._events += _placed(one, compiled.built.name)
            except (OSError, ValueError):
                _log.warning("The trace has no ONNX nodes of %s: no profile.", compiled.built.name, exc_info=True)

    def _forget(self) -> None:
        """Give up everything: a forked child has neither the threads that run sessions nor the profiles."""
        self._begin()
        self._is_closed = True


_log = logging.getLogger(__name__)

_profiles: list[NodeProfile] = []


def _in_child() -> None:
    for one in _profiles:
        one._forget()
    _profiles.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)


def node_profile() -> NodeProfile | None:
    """Give the profile of the innermost block of `profile_nodes` that is open, or None."""
    return _profiles[-1] if _profiles else None


@contextmanager
def profile_nodes() -> Iterator[NodeProfile]:
    """Profile the ONNX nodes of each session that runs in the block while torch's profiler records.

    ONNX Runtime's profiler watches sessions of their own, with the same models and the same results. Each is opened at
    its first run in the block, so ignore the first step. Sessions that a CUDA graph records are not profiled. On CUDA,
    the time of a node is the time to launch it. The end of the block waits for runs that other threads have begun. The
    log names sessions whose nodes the trace lacks.

    Returns:
        A context manager that gives the profile. Call its `export_chrome_trace(profiler, path)` after the block.
    """
    profile = NodeProfile()
    _profiles.append(profile)
    try:
        yield profile
    finally:
        if profile in _profiles:  # as it is but in a forked child
            _profiles.remove(profile)
        profile._close()


def _node_origins(built: BuiltGraph, span: Span) -> dict[str, NodeOrigin]:
    """Find the origin of each ONNX node by the values that FX nodes give; a node before such a value belongs to it."""
    if span.origins is None or span.island not in span.origins.islands:
        return {}
    nodes, island = span.origins.nodes, span.origins.islands[span.island]
    graph = onnx.ModelProto.FromString(built.model).graph

    def origin_of(index: int) -> NodeOrigin | None:
        return nodes[index] if index >= 0 else None

    known = {name: index for name, index in built.values.items() if index < len(island.nodes)}
    of_value = {name: origin_of(island.nodes[index]) for name, index in known.items()}
    of_value |= {value.name: origin_of(index) for value, index in zip(graph.output, island.results, strict=False)}
    found: dict[str, NodeOrigin] = {}
    for node in reversed(graph.node):
        origin = next((of_value[name] for name in node.output if name in of_value), None)
        if origin is None:
            continue
        for name in node.input:
            of_value.setdefault(name, origin)
        found[node.name] = origin
    return found


def _placed(profiled: _Profiled, session: str) -> Iterator[dict[str, Any]]:
    """Give the events of a session's nodes, with times in microseconds since the epoch.

    ONNX Runtime counts from the opening of the session. Each run begins a little after the time that was noted for it,
    so the greatest of the differences is the nearest to the clock's. A run that an error stops has an event if it came
    as far as ONNX Runtime.
    """
    events = profiled.graph.events()
    begins = sorted(one["ts"] for one in events if one["name"] == _RUN)
    runs = sorted(profiled.runs, key=lambda one: one.began)
    if len(begins) != len(runs):
        runs = [one for one in runs if one.is_whole]
    if len(begins) != len(runs):
        message = "The trace has no ONNX nodes of %s: its profile has %d runs, and %d of %d came to their end."
        _log.warning(message, session, len(begins), len(runs), len(profiled.runs))
        return
    if not runs:
        return
    shift = max(run.began / 1e3 - ts for run, ts in zip(runs, begins, strict=True))
    for one in events:
        name = str(one["name"])
        if one.get("cat") != "Node" or not name.endswith(NODE_SUFFIX):
            continue
        run = max(bisect_right(begins, one["ts"]) - 1, 0)
        given = one["args"]
        args = {"node": name.removesuffix(NODE_SUFFIX), "provider": given.get("provider", "")}
        if origin := profiled.origins.get(args["node"]):
            args |= {"operator": origin.overload, "module": origin.module, "line": origin.line}
        yield {
            "ph": "X",
            "cat": "onnxruntime",
            "name": str(given["op_name"]),
            "pid": os.getpid(),
            "tid": runs[run].thread,
            "ts": one["ts"] + shift,
            "dur": one["dur"],
            "args": args,
        }
