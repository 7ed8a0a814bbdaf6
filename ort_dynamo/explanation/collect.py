"""Collects the facts of one compile, as a listener."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch.fx import GraphModule, Node

from ort_dynamo.cache.open_island import OpenedIsland
from ort_dynamo.compilation.cut import PartitionRecord
from ort_dynamo.compilation.events import BoxedRun, GraphCompilation, Listener
from ort_dynamo.explanation.data import Graph, Island, Operator, PassRun, Role, Saved
from ort_dynamo.explanation.step_calls import StepCalls
from ort_dynamo.graph.build import PassRecord
from ort_dynamo.graph.source_line import innermost_module, user_line
from ort_dynamo.passes.fx.analysis.memory import SavedTensor, alive_alone, alive_bytes
from ort_dynamo.passes.fx.analysis.saved_tensors import bytes_of, cast_source
from ort_dynamo.passes.fx.analysis.storage import fakes_in
from ort_dynamo.passes.fx.analysis.views import maker_of
from ort_dynamo.program.progress import RUNNING
from ort_dynamo.report.record import CompileRecord, GraphRecord
from ort_dynamo.report.recorder import graph_record
from ort_dynamo.torch_internals.tracing.frames import current_compile_id

__all__ = ["CHANGES", "Collect"]

CHANGES = {
    "chosen": 'options={"placement": "onnxruntime"}',
    "eager": "ort_dynamo.register_lowering, or another operator in this line",
    "by_design": "",
    "native": "",
    "free": "",
}
"""Place -> the option or call that changes where such an operator runs."""


class Collect(Listener):
    """The facts of one compile.

    Args:
        calls: counts the calls of its graphs.
        opened: called with each graph whose islands are open, before it becomes a function.

    Attributes:
        compile_id: torch's name for the compile.
        partition: the record of the cut; None without gradients.
        records: those of its graphs, as the backend keeps them.
        roles: the facts of its graphs.
        stages: stage, as progress shows it -> seconds; set by whoever has a clock.
        runtime: package, version and provider of its sessions.
    """

    def __init__(self, calls: StepCalls, opened: Callable[[GraphCompilation], None] = lambda graph: None) -> None:
        self.compile_id: str | None = current_compile_id()
        self.partition: PartitionRecord | None = None
        self.records: list[GraphRecord] = []
        self.roles: list[Role] = []
        self.stages: Mapping[str, float] = {}
        self.runtime: str = ""
        self._opened = opened
        self._calls = calls
        self._alive: dict[str, dict[str, int]] = {}
        self._start: dict[str, int] = {}
        self._saved: tuple[Saved, ...] = ()
        self._operators: tuple[Operator, ...] = ()
        self._casts: Counter[str] = Counter()
        self._begin = self._graph_begin = time.perf_counter()

    def cut(self, graphs: Mapping[str, GraphModule], partition: PartitionRecord | None) -> None:
        """Take the predicted memory, and the saved tensors with their modules."""
        self.partition = partition
        if partition is None:
            alive: Sequence[list[int]] = [alive_alone(gm) for gm in graphs.values()]
        else:
            alive = alive_bytes(graphs["forward"], graphs["backward"])
            self._saved = tuple(_saved(graphs["forward"], partition.memory.saved))
        for (role, gm), (start, *at) in zip(graphs.items(), alive, strict=True):
            names = (node.name for node in gm.graph.nodes if node.op == "call_function")
            self._alive[role], self._start[role] = dict(zip(names, at, strict=True)), start

    def begun(self, graph: GraphCompilation) -> None:
        """Take the time, and the target."""
        self._graph_begin = time.perf_counter()
        self.runtime = f"{graph.target.package} {graph.target.version}, {graph.target.provider}"

    def segmented(self, graph: GraphCompilation) -> None:
        """List the operators, while the graph has them."""
        again = {one.name: one.by for one in self.partition.memory.recomputed} if self.partition else {}
        alive = self._alive.get(graph.role, {})
        islands = {
            node.name: name
            for name, island in graph.segmented.islands.items()
            for node in island.graph.nodes
            if node.op == "call_function"
        }
        computing = [n for n in graph.gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
        self._operators = tuple(
            _operator(
                node,
                graph.segmented.outside.get(node.name),
                islands.get(node.name, ""),
                alive.get(node.name, 0),
                again.get(node.name, "") if graph.role == "backward" else "",
            )
            for node in computing
        )
        self._casts = Counter(filter(None, map(_cast, computing)))

    def opened(self, graph: GraphCompilation) -> None:
        """Record the graph with its islands."""
        record = graph_record(graph, time.perf_counter() - self._graph_begin)
        self.records.append(record)
        counts = Counter(one.island for one in self._operators)
        islands = tuple(_island(name, one, counts[name]) for name, one in graph.islands.items())
        on_models = (
            run for (name, one) in graph.islands.items() for run in pass_runs(one.compiled.built.record.passes, name)
        )
        peak = max([self._start.get(graph.role, 0), *self._alive.get(graph.role, {}).values()])
        self.roles.append(
            Role(
                name=graph.role,
                operators=self._operators,
                islands=islands,
                passes=(*pass_runs(record.passes, graph.role), *on_models),
                casts=dict(self._casts),
                peak=peak,
                seconds=record.seconds,
            )
        )
        self._opened(graph)

    def finished(self, graph: GraphCompilation, run: BoxedRun) -> BoxedRun:
        """Count the calls of the graph."""
        return self._calls.watched(self, graph, run)

    def compiled(self) -> CompileRecord:
        """Give the record of the compile, as `summarize` reads it."""
        return CompileRecord(
            self.partition, tuple(self.records), sum(one.seconds for one in self.records), self.compile_id
        )

    def graph(self, function: str) -> Graph:
        """Give the facts of the compile.

        Args:
            function: the function that the graph is of.
        """
        memory = self.partition.memory if self.partition else None
        recomputed = Counter(f"{one.by}: {one.operator}" for one in memory.recomputed) if memory else Counter()
        return Graph(
            function=function,
            compile_id=self.compile_id or "",
            roles=tuple(self.roles),
            passes=tuple(pass_runs(self.partition.passes, "joint graph")) if self.partition else (),
            saved=tuple(sorted(self._saved, key=lambda one: -one.nbytes)),
            nbytes_without=memory.nbytes_without if memory else 0,
            recomputed=dict(recomputed.most_common()),
            recompute_time=memory.time if memory else 0.0,
            stages=stages(self.stages),
        )


def stages(clock: Mapping[str, float]) -> dict[str, float]:
    """Give the seconds of each stage of a compile, in order, by the words of the pipeline.

    Args:
        clock: stage, as progress shows it -> seconds. The time in which nothing compiles does not count.
    """
    found: dict[str, float] = {}
    for name, seconds in clock.items():
        if name == RUNNING or not seconds:
            continue
        word = _STAGES.get(name, name)
        found[word] = found.get(word, 0.0) + seconds
    order = list(dict.fromkeys(_STAGES.values()))
    return dict(sorted(found.items(), key=lambda one: order.index(one[0]) if one[0] in order else len(order)))


_STAGES = {
    "preparing": "prepare",
    "tracing the model": "capture",
    "splitting forward and backward": "mark and partition",
    "choosing where operators run": "segment",
    "translating to ONNX": "lower",
    "optimizing the ONNX model": "rewrite",
    "optimizing in ONNX Runtime": "optimize",
    "starting an ONNX Runtime session": "open",
    "preparing the graph that calls the sessions": "outer graph",
}
"""Stage, as progress shows it -> its word in the pipeline; these are in order."""


def pass_runs(records: Iterable[PassRecord], on: str) -> Iterator[PassRun]:
    """Give records of passes as plain values."""
    for one in records:
        name, _, parameters = one.name.partition("(")
        summary = "" if one.summary is None else str(one.summary)
        yield PassRun(
            name,
            parameters.removesuffix(")"),
            on,
            one.modified,
            one.before,
            one.after,
            one.seconds,
            summary,
            one.operators,
        )


def _operator(node: Node, outside: tuple[str, str] | None, island: str, alive: int, again: str) -> Operator:
    place, reason = outside or ("native" if island else "free", "")
    module, kind = innermost_module(node) or ("", "")
    return Operator(
        name=node.name,
        overload=str(node.target),
        place=place,
        reason=reason,
        change=CHANGES[place],
        line=user_line(node),
        module=module,
        kind=kind,
        island=island,
        result=_spelled(node.meta.get("val")),
        nbytes=sum(bytes_of(fake)[0] for fake in fakes_in(node.meta.get("val"))),
        alive=alive,
        recomputed=again,
    )


def _spelled(value: Any) -> str:
    """Spell the dtypes and shapes of a node's value: "float32[4, 8]"."""
    return ", ".join(_tensor(fake.dtype, fake.shape) for fake in fakes_in(value))


def _tensor(dtype: torch.dtype, shape: Iterable[object]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def _cast(node: Node) -> str:
    """Return "float32 to bfloat16" of a cast; "" of any other node."""
    source = cast_source(node)
    if source is None:
        return ""
    before, after = (fakes_in(one.meta.get("val")) for one in (source, node))
    if not before or not after or before[0].dtype is after[0].dtype:
        return ""
    return f"{before[0].dtype} to {after[0].dtype}".replace("torch.", "")


def _saved(forward: GraphModule, saved: Iterable[SavedTensor]) -> Iterator[Saved]:
    nodes = {node.name: node for node in forward.graph.nodes}
    for one in saved:
        module, kind = innermost_module(maker_of(nodes[one.name])) or ("", "")
        result = _tensor(one.dtype, one.shape)
        yield Saved(one.name, one.operator, module, kind, one.where, result, one.nbytes)


def _island(name: str, island: OpenedIsland, operators: int) -> Island:
    built = island.compiled.built
    nodes = onnx.ModelProto.FromString(built.model).graph.node
    return Island(
        name=name,
        key=island.name,
        covers=island.covers.rpartition(" (")[0],
        operators=operators,
        onnx_nodes=dict(Counter(node.op_type for node in nodes).most_common()),
        casts=dict(Counter(_cast_to(node) for node in nodes if node.op_type == "Cast")),
        nbytes=built.nbytes,
        source=island.source,
        miss=island.miss,
        stored_at=island.stored_at or "",
        seconds=island.seconds,
        stages=dict(built.record.seconds),
    )


def _cast_to(node: onnx.NodeProto) -> str:
    return next(onnx.TensorProto.DataType.Name(one.i).lower() for one in node.attribute if one.name == "to")
