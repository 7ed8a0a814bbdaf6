"""Run a built graph in a session that ONNX Runtime's own profiler watches."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.runtime.compiled_graph import CompiledGraph
from ort_dynamo.runtime.session import open_session
from ort_dynamo.runtime.streams import SessionStream
from ort_dynamo.targets.target import Target

__all__ = ["NODE_SUFFIX", "NodeTime", "Profile", "ProfiledGraph"]

NODE_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class NodeTime:
    """The time of one node of a session.

    Attributes:
        name: the node's name.
        op_type: its operator.
        seconds: median of the runs. An If, Loop or Scan has its own time, without that of the nodes inside it.
    """

    name: str
    op_type: str
    seconds: float


@dataclass(frozen=True)
class Profile:
    """The profile of a session.

    Attributes:
        nodes: its nodes, in the order in which they ran.
        in_use: bytes of the arena that were in use before the first node of a run, and most at once; None if ONNX
            Runtime does not tell.
    """

    nodes: tuple[NodeTime, ...]
    in_use: tuple[int, int] | None


class ProfiledGraph:
    """A built graph in a session of its own, with the profiler on.

    Args:
        built: the graph.
        target: the target that it was lowered for.
        device: the device of its tensors.

    Attributes:
        run: runs it, as CompiledGraph's `run` does.
    """

    def __init__(self, built: BuiltGraph, target: Target, device: torch.device) -> None:
        self._folder = tempfile.mkdtemp(prefix="ort_dynamo-")
        given = (
            *built.session.session_options,
            ("enable_profiling", True),
            ("profile_file_prefix", os.path.join(self._folder, "profile")),
        )
        watched = dataclasses.replace(
            built, session=dataclasses.replace(built.session, session_options=given), reference=b""
        )
        on_streams = target.facts.computes_on_streams
        stream = SessionStream(device, dict(built.session.provider_options)) if on_streams else None
        self._sessions: list[Any] = []

        def opened() -> Any:
            self._sessions.append(open_session(watched, target, device, stream))
            return self._sessions[-1]

        try:
            self.run: Callable[..., Any] = CompiledGraph(watched, opened, device, stream).run
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def close(self, skipped: int = 1) -> Profile:
        """End the profile, and read it.

        Args:
            skipped: how many of the first runs do not count.
        """
        return read_profile([one for one in self.events() if one.get("cat") == "Node"], skipped)

    def events(self) -> list[dict[str, Any]]:
        """End the profile, and give its events, in the format of Chrome's traces."""
        try:
            path = Path(self._sessions[0].end_profiling())
            events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        finally:
            shutil.rmtree(self._folder)
        return events


def read_profile(events: Iterable[Mapping[str, Any]], skipped: int) -> Profile:
    """Read the events of nodes.

    Args:
        events: those of the category "Node", of all runs.
        skipped: how many of the first runs do not count.
    """
    kernels = [one for one in events if str(one["name"]).endswith(NODE_SUFFIX)]
    times: dict[tuple[str, str, str], list[float]] = {}
    inside = _inside(kernels)
    for index, one in enumerate(kernels):
        given = one["args"]
        key = str(one["name"]).removesuffix(NODE_SUFFIX), str(given["op_name"]), str(given.get("node_index", ""))
        times.setdefault(key, []).append(max(one["dur"] - inside[index], 0) / 1e6)
    nodes = tuple(
        NodeTime(name, op_type, statistics.median(seconds[skipped:] or seconds))
        for (name, op_type, _), seconds in times.items()
    )
    return Profile(nodes, _in_use(kernels))


def _inside(kernels: Sequence[Mapping[str, Any]]) -> list[float]:
    """Give the microseconds of the nodes directly inside each node, which has a subgraph or has none."""
    inside = [0.0] * len(kernels)
    around: list[int] = []
    for index in sorted(range(len(kernels)), key=lambda index: (kernels[index]["ts"], -kernels[index]["dur"])):
        now = kernels[index]
        while around and now["ts"] >= kernels[around[-1]]["ts"] + kernels[around[-1]]["dur"]:
            around.pop()
        if around:
            inside[around[-1]] += now["dur"]
        if now["args"]["op_name"] in _WITH_SUBGRAPHS:
            around.append(index)
    return inside


_WITH_SUBGRAPHS = ("If", "Loop", "Scan")


def _in_use(kernels: Iterable[Mapping[str, Any]]) -> tuple[int, int] | None:
    told = [one["args"] for one in kernels if "mem_bytes_in_use" in one["args"]]
    if not told:
        return None
    first = min(int(one["mem_bytes_in_use"]) - max(int(one["mem_in_use_delta"]), 0) for one in told)
    return first, max(int(one["mem_bytes_in_use"]) for one in told)
