"""One graph, from FX to a callable: the page to read first.

`compile_graph` is what AOTAutograd calls for the forward, the backward and the inference graph.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import torch
from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase

from ort_dynamo.boundary import ValueSpec
from ort_dynamo.build import BuildRecord, BuildSpec, BuiltGraph
from ort_dynamo.cache.disk import DiskCache, Miss, disk_cache, disk_key
from ort_dynamo.cache.graph_key import GraphKey, graph_key
from ort_dynamo.cache.kernel_files import kernel_files
from ort_dynamo.lowering.registry import outside_lowerings
from ort_dynamo.lowering.translate import Lowered, lower, refusal
from ort_dynamo.marks import FX_NODE, RETURNED_STRIDES, RETURNED_VIEWS, WRITTEN_FOR
from ort_dynamo.opened import CACHE
from ort_dynamo.options.groups import DumpOptions, Options
from ort_dynamo.partition.cut import PartitionRecord
from ort_dynamo.passes.onnx.fuse_kernels import fused_ops, unmade
from ort_dynamo.passes.outside import outside_functions
from ort_dynamo.passes.pipelines import onnx_passes, order_passes, outer_passes, running_passes
from ort_dynamo.passes.running import run_passes
from ort_dynamo.progress import stage
from ort_dynamo.report.counts import report
from ort_dynamo.report.record import GraphRecord, IslandRecord, Source
from ort_dynamo.runtime.boxed import Island, boxed
from ort_dynamo.runtime.capabilities import runtime_facts
from ort_dynamo.runtime.compiled_graph import CompiledGraph, open_graph
from ort_dynamo.runtime.in_torch import InTorch
from ort_dynamo.runtime.providers import usable_target
from ort_dynamo.runtime.session import optimize
from ort_dynamo.saving.files import check_model
from ort_dynamo.saving.island import IslandFiles
from ort_dynamo.saving.join import describe_graph
from ort_dynamo.segment.classify import session_device
from ort_dynamo.segment.compare_ranks import compare_ranks, graph_of_ranks
from ort_dynamo.segment.recording import plan_recording
from ort_dynamo.segment.segment import Segmented, allowed_target, check_fallback, segment
from ort_dynamo.segment.trials import Trials
from ort_dynamo.source_line import describe
from ort_dynamo.spelled_graph import spelled
from ort_dynamo.stored_code import IslandPlace, StoredCode
from ort_dynamo.target import Target

__all__ = ["build_island", "build_spec", "compile_graph", "compile_island"]


def compile_graph(
    gm: GraphModule,
    role: str,
    options: Options,
    seen: slice = slice(None),
    record: Callable[[GraphRecord], None] = lambda record: None,
    *,
    graphs: Sequence[GraphRecord] = (),
    keeps: bool = False,
    partition: PartitionRecord | None = None,
    forward_recorded: bool = True,
) -> Callable[[list[Any]], Any]:
    """Compile one functional ATen graph.

    Args:
        gm: the graph, with fake values in meta["val"].
        role: "forward", "backward", "inference" or "training" (a whole step); for messages and file names.
        options: all options.
        seen: which outputs the program gets to see.
        record: called with what the compile learned.
        graphs: the records of all graphs of this compile, to which `record` adds; a RunWatch sees them when this runs.
        keeps: whether AOTAutograd keeps what comes out.
        partition: of a forward, what the cut of its joint graph did.
        forward_recorded: of a backward, whether its forward is recorded in a CUDA graph if that was asked for.

    Returns:
        A function of one list of inputs, which it empties so that each input is freed after its last use.
    """
    begin = time.perf_counter()
    device = session_device(gm)
    target = allowed_target(usable_target(device.type), options)
    recording = plan_recording(gm, role, options.session, target, device, forward_recorded=forward_recorded)
    graph = graph_of_ranks(gm, options.segment)
    segmented = segment(gm, Trials(partial(refusal, target=target, unmade=unmade)), device, fused=target.fuses_kernels)
    report(role, segmented.native, segmented.by_design, segmented.chosen, segmented.eager, len(segmented.islands))
    check_fallback(segmented, options.segment, role)
    spec = build_spec(options, target, device, role)
    _say_what_for(segmented, gm, role)
    functions = outside_functions(options.passes.extra_passes)
    compare_ranks(graph, role, segmented, spec, functions)
    opening = _opening(options, target, device)
    islands, recording = recording.opening(partial(_compile_islands, segmented, spec, role, functions, opening))
    passes = run_passes(
        outer_passes(seen),
        segmented.gm,
        check=options.dump.verify,
        folder=options.dump.save_onnx,
    )
    learned = GraphRecord(
        role=role,
        native=segmented.native,
        by_design=segmented.by_design,
        chosen=segmented.chosen,
        eager=segmented.eager,
        islands=tuple(learned for learned, _ in islands.values()),
        passes=passes,
        seconds=time.perf_counter() - begin,
        described=describe_graph(segmented, role, options.dump, seen),
        not_recorded=recording.refused,
    )
    record(learned)
    run_passes(
        _running_passes(gm, role, seen),
        segmented.gm,
        check=options.dump.verify,
        folder=options.dump.save_onnx,
    )
    if keeps:
        places = {name: place for name, (_, place) in islands.items()}
        return StoredCode(segmented.gm, spelled(gm), places, learned, partition, options.cache, graphs)
    in_torch = InTorch(spelled(gm))
    run = recording.around(boxed(segmented.gm, graphs, options.dump, in_torch))
    return in_torch.around(run, gm) if recording.is_wanted else run  # a recording copies inputs, without tangents


def _running_passes(gm: GraphModule, role: str, seen: slice) -> tuple[PassBase, ...]:
    """Give the passes on the outer graph of `gm`, by what was noted of the outputs when it was traced."""
    return running_passes(
        seen,
        gm.meta.get(RETURNED_VIEWS, frozenset()),
        returned=slice(None) if role == "backward" else seen,
        strides=gm.meta.get(RETURNED_STRIDES, {}),
    )


def _say_what_for(segmented: Segmented, gm: GraphModule, role: str) -> None:
    """Have each island say what its model is written for."""
    for name, island in segmented.islands.items():
        island.meta[WRITTEN_FOR] = f"{gm.meta.get(WRITTEN_FOR, '')} {role} {name}".strip()


def build_spec(options: Options, target: Target, device: torch.device, role: str) -> BuildSpec:
    """What the islands of one graph are built by; torch's present settings fill in what the options leave open."""
    return BuildSpec(
        passes=onnx_passes(options.passes, target),
        session=options.session.resolved(on_cuda=target.computes_on_streams),
        dump=options.dump,
        target=target,
        device=device,
        in_order=role != "inference" and target.shares_an_arena,  # its order decides how much is alive at once
    )


class _Opening(NamedTuple):
    """The source of the islands of a graph.

    Attributes:
        stored: holds those that were built before; None where none is to be used.
        opened: opens one.
    """

    stored: DiskCache | None
    opened: Callable[[BuiltGraph], CompiledGraph]


def _opening(options: Options, target: Target, device: torch.device) -> _Opening:
    cache = disk_cache(options.cache)
    stored = cache if options.dump == DumpOptions() else None  # an island that is saved or verified is built each time
    return _Opening(stored, partial(open_graph, target=target, device=device, store=kernel_files(cache)))


def _compile_islands(
    segmented: Segmented,
    spec: BuildSpec,
    role: str,
    functions: Mapping[str, Callable[..., Any]],
    opening: _Opening,
    record: bool,
) -> dict[str, tuple[IslandRecord, IslandPlace | None]]:
    """All islands of a graph, by name; with `record` their sessions are opened for a CUDA graph."""
    spec = dataclasses.replace(spec, session=dataclasses.replace(spec.session, cuda_graphs=record))
    return {
        name: _compile_island(segmented.gm, name, island, spec, role, functions, opening)
        for name, island in segmented.islands.items()
    }


def _compile_island(
    outer: GraphModule,
    name: str,
    island: GraphModule,
    spec: BuildSpec,
    role: str,
    functions: Mapping[str, Callable[..., Any]],
    opening: _Opening,
) -> tuple[IslandRecord, IslandPlace | None]:
    """Put what runs an island into the outer graph: from memory, else of what is stored, else built."""
    begin = time.perf_counter()
    key = graph_key(island, spec, functions={**outside_lowerings(island), **functions})
    called = f"{role}-{key or 'unkeyed'}"
    made: list[_Made] = []

    def make() -> CompiledGraph:
        compiled, found = _opened(island, spec, called, key, opening)
        made.append(found)
        return compiled

    compiled = CACHE.get_or_make(key, make)
    places = _places(island, compiled.built)
    outer.set_submodule(name, Island(compiled, places))
    found = made[0] if made else _Made(compiled.built, "memory")
    learned = IslandRecord(called, found.source, compiled.built.record, time.perf_counter() - begin, found.miss)
    at = "" if key is None else disk_key(key, runtime_facts())
    if key is None or opening.stored is None or not opening.stored.holds(at):
        return learned, None
    return learned, IslandPlace(key, at, spec.session, spec.in_order, spec.device, places)


class _Made(NamedTuple):
    """What was built of an island, where it comes from, and why it was built if it was."""

    built: BuiltGraph
    source: Source
    miss: str = ""


def _opened(
    island: GraphModule, spec: BuildSpec, called: str, key: GraphKey | None, opening: _Opening
) -> tuple[CompiledGraph, _Made]:
    """An island, opened, of what is stored, or else built and stored."""
    stored, opened = opening
    if key is None or stored is None:
        built = build_island(island, spec, called)
        stage("opening in ONNX Runtime")
        return opened(built), _Made(built, "built", "unkeyed" if key is None else "off")
    place = disk_key(key, runtime_facts())
    with stored.making(place):
        return _read_or_made(island, spec, called, stored, opened, place)


def _read_or_made(
    island: GraphModule,
    spec: BuildSpec,
    called: str,
    stored: DiskCache,
    opened: Callable[[BuiltGraph], CompiledGraph],
    place: str,
) -> tuple[CompiledGraph, _Made]:
    read = stored.load(place, called, spec, opened)
    if not isinstance(read, Miss):
        return read, _Made(read.built, "disk")
    built = build_island(island, spec, called)
    stage("opening in ONNX Runtime")
    compiled = opened(built)
    stored.store(place, built)
    return compiled, _Made(built, "built", read.reason)


def _places(island: GraphModule, built: BuiltGraph) -> dict[str, str]:
    """Name of an ONNX node that data can stop -> where it comes from in this island, which may share what is built."""
    nodes = list(island.graph.nodes)
    return {name: describe(nodes[index]) for name, index in built.origins.items() if index < len(nodes)}


def _origins(gm: GraphModule, model: ir.Model) -> dict[str, int]:
    """Name of an ONNX node that data can stop -> index of the FX node that it was lowered from."""
    indices = {node.name: index for index, node in enumerate(gm.graph.nodes)}
    stopped = (node for node in model.graph.all_nodes() if node.name and node.op_type.startswith(_STOPPED_BY_DATA))
    makers = {str(node.name): node.metadata_props.get(FX_NODE, "").partition(":")[0] for node in stopped}
    return {name: indices[maker] for name, maker in makers.items() if maker in indices}


_STOPPED_BY_DATA = ("Gather", "Scatter")
"""How the names of operators begin whose kernels look at indices. A zero divisor stops a Gather, too."""


def compile_island(gm: GraphModule, spec: BuildSpec, name: str) -> CompiledGraph:
    """Build one island, every node of which the target takes, and open it; errors and files call it `name`."""
    return open_graph(build_island(gm, spec, name), spec.target, spec.device)


def build_island(gm: GraphModule, spec: BuildSpec, name: str) -> BuiltGraph:
    """Lower one island and rewrite it; what comes out can be stored."""
    watch, options = _Watch(), spec.dump
    files = IslandFiles(options, name, gm)
    lowered = lower(gm, spec.target)
    inputs = _drop_unread(lowered)
    watch.stage("lower")
    files.lowered(lowered.model)
    stage("rewriting")
    passes = run_passes(spec.passes, lowered.model, check=options.verify, folder=options.save_onnx)
    model = ir.to_proto(lowered.model).SerializeToString()
    watch.stage("rewrite")
    check_model(model, options)
    files.rewritten(lowered.model, model)
    nodes = list(lowered.model.graph)
    dtypes = frozenset(value.dtype for node in nodes for value in node.outputs if value.dtype is not None)
    built = BuiltGraph(
        name=name,
        model=model,
        inputs=inputs,
        outputs=lowered.outputs,
        session=spec.session,
        dtypes=dtypes,
        in_order=spec.in_order,
        keyable=lowered.keyable,
        origins=_origins(gm, lowered.model),
        record=BuildRecord(len(nodes), passes, watch.seconds),
        kernels=fused_ops(lowered.model),
        reference=model if options.verify_sessions else b"",
    )
    optimized = spec.session.graph_optimization != "disable"
    if optimized and spec.in_order:
        built = _optimized_in_order(built, lowered.model, spec)
    if optimized and files.asked:
        files.optimized(built.model if spec.in_order else optimize(built, spec.target, spec.device))
    return built


def _drop_unread(lowered: Lowered) -> tuple[ValueSpec, ...]:
    """Drop the inputs that no node of a model reads, such as the bias of a layer norm from the gradient of this."""
    graph = lowered.model.graph
    read = [bool(value.uses()) or value.is_graph_output() for value in graph.inputs]
    kept = [value for value, is_read in zip(graph.inputs, read, strict=True) if is_read]
    graph.inputs.clear()
    graph.inputs.extend(kept)
    both = zip(lowered.inputs, read, strict=True)
    return tuple(spec if is_read else dataclasses.replace(spec, is_read=False) for spec, is_read in both)


def _optimized_in_order(built: BuiltGraph, lowered: ir.Model, spec: BuildSpec) -> BuiltGraph:
    """What ONNX Runtime's optimizers make of `built`, with its nodes back in the order that they had."""
    watch = _Watch()
    stage("optimizing in ONNX Runtime")
    optimized = ir.from_proto(onnx.ModelProto.FromString(optimize(built, spec.target, spec.device)))
    passes = run_passes(order_passes(lowered), optimized, check=spec.dump.verify, folder=spec.dump.save_onnx)
    model = ir.to_proto(optimized).SerializeToString()
    watch.stage("optimize")
    return dataclasses.replace(
        built,
        model=model,
        session=dataclasses.replace(spec.session, graph_optimization="disable"),
        record=dataclasses.replace(
            built.record,
            passes=built.record.passes + passes,
            seconds={**built.record.seconds, **watch.seconds},
        ),
    )


class _Watch:
    """Seconds by stage, each from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stage(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
