"""Measures the sessions of a dry run, and the ONNX nodes in them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from ort_dynamo.cache.open_island import OpenedIsland
from ort_dynamo.compilation.events import GraphCompilation, Listener
from ort_dynamo.explanation.data import Graph, Island, Measured, OnnxNode, Role
from ort_dynamo.graph.build import BuildStage
from ort_dynamo.graph.marks import fx_node_name
from ort_dynamo.lowering.build_island import build_island
from ort_dynamo.runtime.boxed import Island as IslandModule
from ort_dynamo.runtime.observe.profiled_run import Profile, ProfiledGraph
from ort_dynamo.targets.target import Target

__all__ = ["Measuring"]

_STEPS = 5
"""Steps that are timed, after the one that compiles."""

_PROFILED = 5
"""Steps under ONNX Runtime's profiler, of which the first does not count."""


class _StepTimes(Protocol):
    forward: float
    backward: float | None

    def __call__(self) -> None: ...


@dataclass
class _Watched:
    """An island of the dry run, whose session is timed or profiled.

    Attributes:
        at: the number of the compile, the graph's role and the island's name.
        island: the island.
        target: the target of its session.
        device: the device of its tensors.
        origins: name of an ONNX node -> the FX node that it was lowered from.
        plain: runs its session.
        current: what runs at present.
        seconds: of the runs so far.
        profile: of ONNX Runtime's profiler.
    """

    at: tuple[int, str, str]
    island: OpenedIsland
    target: Target
    device: torch.device
    origins: Mapping[str, str]
    plain: Callable[..., Any]
    current: Callable[..., Any]
    seconds: list[float] = field(default_factory=list)
    profile: Profile | None = None

    def run(self, *values: Any) -> Any:
        return self.current(*values)

    def timed(self, *values: Any) -> Any:
        self._wait()
        begin = time.perf_counter()
        result = self.plain(*values)
        self._wait()
        self.seconds.append(time.perf_counter() - begin)
        return result

    def _wait(self) -> None:
        if self.target.facts.computes_on_streams:
            torch.cuda.synchronize(self.device)


class _Stand:
    """Stands for a compiled graph in the outer graph of a dry run.

    Attributes:
        built: the built graph.
        run: runs it.
    """

    def __init__(self, watched: _Watched) -> None:
        self.built = watched.island.compiled.built
        self.run = watched.run


class Measuring(Listener):
    """The islands of a dry run, and their times.

    It hears of the compiles, since ONNX Runtime's optimizers drop the names of FX nodes from a model.
    """

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._origins: list[tuple[GraphModule, Mapping[str, str]]] = []

    def built(self, stage: BuildStage) -> None:
        """Note which ONNX node is of which FX node."""
        if stage.stage == "rewritten" and stage.model is not None:
            makers = ((str(node.name), fx_node_name(node.metadata_props)) for node in stage.model.graph.all_nodes())
            self._origins.append((stage.island, {name: maker for name, maker in makers if maker}))

    def open(self, graph: GraphCompilation, number: int) -> None:
        """Watch the islands of a graph, before its outer graph becomes a function.

        Args:
            graph: the graph.
            number: of its compile.
        """
        for name, island in graph.islands.items():
            run = island.compiled.run
            origins = self._origins_of(graph, name)
            one = _Watched((number, graph.role, name), island, graph.target, graph.device, origins, run, run)
            stand: Any = _Stand(one)
            graph.segmented.gm.set_submodule(name, IslandModule(stand, island.places, island.covers))
            self._watched.append(one)

    def _origins_of(self, graph: GraphCompilation, name: str) -> Mapping[str, str]:
        """Return the FX node of each ONNX node of an island; one that a cache had is lowered again for that."""
        gm = graph.segmented.islands[name]
        if not any(known is gm for known, _ in self._origins):
            settings = dataclasses.replace(graph.spec.session, graph_optimization="disable")
            spec = dataclasses.replace(graph.spec, session=settings)
            build_island(gm, spec, graph.islands[name].name, self.built)
        return next(origins for known, origins in self._origins if known is gm)

    def measure(self, step: _StepTimes) -> Measured:
        """Run some steps with timed sessions, and some with profiled ones."""
        for one in self._watched:
            one.current = one.timed
        forward, backward, sessions = [], [], []
        cuda = any(one.target.facts.computes_on_streams for one in self._watched)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        for _ in range(_STEPS):
            ran = [len(one.seconds) for one in self._watched]
            step()
            forward.append(step.forward)
            backward.append(step.backward)
            sessions.append(sum(sum(one.seconds[n:]) for one, n in zip(self._watched, ran, strict=True)))
        peak = torch.cuda.max_memory_allocated() - held if cuda else None
        self._profile(step)
        types: Counter[str] = Counter()
        for one in self._watched:
            for node in one.profile.nodes if one.profile else ():
                types[node.op_type] += node.seconds  # type: ignore[assignment]
        took = [one for one in backward if one is not None]
        return Measured(
            steps=_STEPS,
            forward=statistics.median(forward),
            backward=statistics.median(took) if took else None,
            sessions=statistics.median(sessions),
            peak=peak if cuda else self._arena_peak(),
            peak_of="torch's memory" if cuda else "ONNX Runtime's arena",
            by_type=dict(types.most_common()),
        )

    def _profile(self, step: Callable[[], None]) -> None:
        opened = []
        try:
            for one in self._watched:
                opened.append(ProfiledGraph(one.island.compiled.built, one.target, one.device))
                one.current = opened[-1].run
            for _ in range(_PROFILED):
                step()
        finally:
            profiles = [graph.close() for graph in opened]
            for one in self._watched:
                one.current = one.plain
        for one, profile in zip(self._watched, profiles, strict=True):
            one.profile = profile

    def _arena_peak(self) -> int | None:
        told = [one.profile.in_use for one in self._watched if one.profile and one.profile.in_use]
        return max(most for _, most in told) - min(first for first, _ in told) if told else None

    def fill(self, number: int, graph: Graph) -> Graph:
        """Return a graph with the times of its islands and operators.

        Args:
            number: of its compile.
            graph: its facts.
        """
        return dataclasses.replace(graph, roles=tuple(self._role(number, role) for role in graph.roles))

    def _role(self, number: int, role: Role) -> Role:
        watched = {one.at[2]: one for one in self._watched if one.at[:2] == (number, role.name)}
        islands = tuple(_timed(one, watched[one.name]) for one in role.islands)
        times: dict[tuple[str, str], float] = {}
        for island in islands:
            for node in island.nodes:
                at = (island.name, node.operator)
                times[at] = times.get(at, 0.0) + node.seconds
        operators = tuple(dataclasses.replace(one, seconds=times.get((one.island, one.name))) for one in role.operators)
        return dataclasses.replace(
            role, islands=islands, operators=operators, measured=sum(one.measured or 0.0 for one in islands)
        )


def _timed(island: Island, watched: _Watched) -> Island:
    """Return an island with its times; a node that ONNX Runtime fused counts for the one whose name it begins with."""
    nodes = watched.profile.nodes if watched.profile else ()
    return dataclasses.replace(
        island,
        measured=statistics.median(watched.seconds) if watched.seconds else None,
        nodes=tuple(OnnxNode(one.name, one.op_type, _origin(one.name, watched.origins), one.seconds) for one in nodes),
    )


def _origin(name: str, origins: Mapping[str, str]) -> str:
    """Return the operator of an ONNX node; ONNX Runtime names a node of its own after one that it replaces."""
    if name in origins:
        return origins[name]
    return max(((len(known), maker) for known, maker in origins.items() if known in name), default=(0, ""))[1]
