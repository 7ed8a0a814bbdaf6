"""The compile on one page: from a graph of Dynamo's to the functions that run its forward and its backward.

AOTAutograd calls the methods of `Compilation`: `partition`, `forward` and `backward` for a graph with gradients, else
`inference`. docs/internals/tour.md follows a graph through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule

from ort_dynamo.cache.disk import DiskCache, disk_cache, make_named_folder
from ort_dynamo.cache.open_island import OpenedIsland, open_island
from ort_dynamo.capture.trace import trace
from ort_dynamo.compilation.choose_target import graph_target
from ort_dynamo.compilation.cut import mark_inference, partition, run_checked
from ort_dynamo.compilation.events import BoxedRun, GraphCompilation, Listener, open_islands
from ort_dynamo.errors import SessionError
from ort_dynamo.graph.build import BuildSpec, PassRecord
from ort_dynamo.graph.marks import RETURNED_STRIDES, RETURNED_VIEWS, WRITTEN_BACK
from ort_dynamo.graph.node_origins import find_origins, mark_nodes
from ort_dynamo.graph.serialized_graph import spelled
from ort_dynamo.lowering.registry import outside_lowerings
from ort_dynamo.options.groups import DumpOptions, Options
from ort_dynamo.passes.fx.analysis.storage_places import counted_from_storage
from ort_dynamo.passes.outside import outside_functions
from ort_dynamo.passes.pipelines import onnx_passes, outer_passes, running_passes
from ort_dynamo.program.progress import stage
from ort_dynamo.runtime.arena import ARENA
from ort_dynamo.runtime.boxed import Island, boxed
from ort_dynamo.runtime.in_torch import InTorch
from ort_dynamo.segment.probe_lowering import LoweringProbe
from ort_dynamo.segment.segment import check_fallback, segment
from ort_dynamo.targets.target import Target

__all__ = ["Compilation", "build_spec"]


class Compilation:
    """The compile of one graph of Dynamo's.

    Args:
        options: all options.
        device: the device of its sessions.
        threads: the number of threads for choices between torch and a session, and between forms in a session.
        listeners: the listeners to all stages.
        label: the label for each RunWatch when one of the graphs runs; it may still grow.
        role: the role of a graph without gradients: "inference", or "training" for a whole step.
    """

    def __init__(
        self,
        options: Options,
        device: torch.device,
        threads: int,
        listeners: Listener,
        label: Sequence[Any] = (),
        role: str = "inference",
    ) -> None:
        self.options: Options = options
        self.device: torch.device = device
        self.threads: int = threads
        self.listeners: Listener = listeners
        self.label: Sequence[Any] = label
        self.role: str = role
        make_named_folder(options.cache)
        self.cache: DiskCache | None = disk_cache(options.cache)

    @cached_property
    def target(self) -> Target:
        """The target that sessions are compiled for. A graph that comes whole from torch's cache does not read it."""
        return graph_target(self.device, self.options)

    def run(self, gm: GraphModule, inputs: Sequence[Any], stored_as: str | None = None) -> Callable[..., Any]:
        """1. Capture: AOTAutograd traces the graph, and calls the methods below."""
        return trace(
            gm,
            inputs,
            forward=self.forward,
            backward=self.backward,
            inference=self.inference,
            partition=self.partition,
            stored_as=stored_as,
        )

    def partition(self, joint: GraphModule, inputs: Sequence[Any], **given: Any) -> tuple[GraphModule, GraphModule]:
        """2. Mark the joint graph, and 3. cut it into forward and backward."""
        self.listeners.traced(joint)
        stage("splitting forward and backward")
        forward, backward, record = partition(joint, inputs, self.options, self.target, self.threads, **given)
        if self.target.facts.shares_an_arena:
            ARENA.expect(record.memory.peak)
        self.listeners.cut({"forward": forward, "backward": backward}, record)
        return forward, backward

    def forward(self, gm: GraphModule, seen: slice) -> BoxedRun:
        """Compile a forward graph; the program sees its outputs in `seen`."""
        return self.graph(gm, "forward", seen)

    def backward(self, gm: GraphModule, seen: slice) -> BoxedRun:
        """Compile a backward graph."""
        return self.graph(gm, "backward", seen)

    def inference(self, gm: GraphModule, seen: slice) -> BoxedRun:
        """Mark and compile a graph without gradients."""
        self.listeners.traced(gm)
        passes = mark_inference(gm, self.options, self.target, self.threads)
        self.listeners.cut({self.role: gm}, None)
        return self.graph(gm, self.role, seen, passes)

    def graph(self, gm: GraphModule, role: str, seen: slice, passes: tuple[PassRecord, ...] = ()) -> BoxedRun:
        """Compile one functional ATen graph, with fake values in meta["val"], on which `passes` have run."""
        graph = GraphCompilation(gm, role, seen, self.device, self.target, passes=passes)
        self.listeners.begun(graph)
        mark_nodes(gm)
        graph.functions = outside_functions(self.options.passes.extra_passes)
        graph.spec = build_spec(self.options, self.target, self.device, role, self.threads)
        probe = LoweringProbe.of(self.target, counted_from_storage(gm.graph))
        while not self.open(graph, probe):
            stage("leaving an island that ONNX Runtime refuses to torch")
        segmented, outer = graph.segmented, graph.segmented.gm
        stage("preparing the graph that calls the sessions")
        for name, island in graph.islands.items():
            outer.set_submodule(name, Island(island.compiled, island.places, island.covers))
        graph.passes += run_checked(outer_passes(seen), outer, self.options)
        self.listeners.opened(graph)
        # 9. The outer graph, as the function that runs.
        views, written = gm.meta.get(RETURNED_VIEWS, frozenset()), gm.meta.get(WRITTEN_BACK, {})
        returned = slice(None) if role == "backward" else seen
        strides = gm.meta.get(RETURNED_STRIDES, {})
        last = running_passes(seen, views, returned=returned, strides=strides, written=written)
        run_checked(last, outer, self.options)
        graph.whole, graph.origins = spelled(gm), find_origins(gm, outer, segmented.islands, role)
        run = boxed(outer, self.label, self.options.dump, InTorch(graph.whole), graph.origins)
        return self.listeners.finished(graph, run)

    def open(self, graph: GraphCompilation, probe: LoweringProbe) -> bool:
        """Cut a graph into islands and open each; False if ONNX Runtime refused one: `probe` leaves its nodes."""
        # 4. Segment: nodes that a session runs become islands.
        graph.segmented = segment(graph.gm, probe, self.device, fused=self.target.fuses_kernels)
        self.listeners.segmented(graph)
        check_fallback(graph.segmented, self.options.segment, graph.role)
        # 5. Key, 6. lower, 7. rewrite and 8. open each island.
        with _leaving_refused(graph, probe, replaced=self.options.replaces_refused_models) as refused:
            graph.islands = open_islands(graph, self.island, self.listeners)
        return not refused

    def island(self, island: GraphModule, graph: GraphCompilation) -> OpenedIsland:
        """Find the island in memory or on disk by its key, or build it."""
        return open_island(
            island,
            graph.spec,
            graph.role,
            functions={**outside_lowerings(island), **graph.functions},
            cache=self.cache,
            reads=self.options.dump == DumpOptions(),  # an island that is saved or verified is built each time
            built=self.listeners.built,
        )


def build_spec(
    options: Options, target: Target, device: torch.device, role: str, threads: int | None = None
) -> BuildSpec:
    """Give all that decides how islands are built; torch's present settings fill in options that are left open.

    Args:
        options: all options.
        target: the target of the sessions.
        device: their device.
        role: the role of the graph.
        threads: the number of threads for choices between forms, which all ranks share; None for that of the sessions.
    """
    session = options.session.resolved(on_cuda=target.facts.computes_on_streams)
    return BuildSpec(
        passes=onnx_passes(options.passes, target, threads or session.intra_op_num_threads),
        session=session,
        dump=options.dump,
        target=target,
        device=device,
        in_order=role != "inference" and target.facts.shares_an_arena,  # its order decides how much is alive at once
    )


@contextmanager
def _leaving_refused(graph: GraphCompilation, probe: LoweringProbe, *, replaced: bool) -> Iterator[list[str]]:
    """Have `probe` refuse the nodes of the island whose model ONNX Runtime refuses; the list has the reason then.

    Args:
        graph: the graph whose islands are opened meanwhile.
        probe: the probe of its next cut.
        replaced: False to raise the SessionError instead.
    """
    reasons: list[str] = []
    try:
        yield reasons
    except SessionError as error:
        if not replaced:
            raise
        words = " ".join(str(error.facts["error"]).split())
        reasons.append(f"ONNX Runtime refuses the model: {words}")
        probe.refuse((node.name for node in graph.opening.graph.nodes), reasons[0])
