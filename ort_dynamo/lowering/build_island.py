"""Builds an island: lowers it, rewrites the model, and has ONNX Runtime optimize it where its order has to be kept."""

from __future__ import annotations

import dataclasses
import logging
import operator
import time
from collections.abc import Callable
from functools import partial

import onnx
import onnx_ir as ir
from torch.fx import GraphModule

from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.build import BuildRecord, BuildSpec, BuildStage, BuiltGraph
from ort_dynamo.graph.marks import FX_NODE, fx_node_name
from ort_dynamo.lowering.translate import Lowered, lower
from ort_dynamo.passes.onnx.fuse_kernels import fused_ops
from ort_dynamo.passes.pipelines import order_passes
from ort_dynamo.passes.running import run_passes
from ort_dynamo.program.progress import stage
from ort_dynamo.runtime.session import optimize

__all__ = ["build_island", "drop_unread"]

_log = logging.getLogger(__name__)


def build_island(
    gm: GraphModule, spec: BuildSpec, name: str, built: Callable[[BuildStage], None] = lambda stage: None
) -> BuiltGraph:
    """Lower one island, whose nodes all run on the target, and rewrite the model; the result can be stored.

    Args:
        gm: the island's graph.
        spec: everything else that decides the result.
        name: the name of the island in errors and files.
        built: called at each stage.

    Raises:
        LoweringError: a lowering failed.
        PassFailedError, PassBrokeGraphError: a pass failed.
        SessionError: ONNX Runtime refused the model.
    """
    watch, options = _Watch(), spec.dump
    lowered = lower(gm, spec.target)
    inputs, values = drop_unread(lowered), _values(gm, lowered.model)
    watch.stage("lower")
    built(BuildStage(name, gm, "lowered", lowered.model, partial(_serialised, lowered.model)))
    stage("optimizing the ONNX model")
    passes = run_passes(spec.passes, lowered.model, check=options.verify, folder=options.save_onnx)
    model = _serialised(lowered.model)
    watch.stage("rewrite")
    if options.verify:
        onnx.checker.check_model(model)
    built(BuildStage(name, gm, "rewritten", lowered.model, lambda: model))
    nodes = list(lowered.model.graph)
    dtypes = frozenset(value.dtype for node in nodes for value in node.outputs if value.dtype is not None)
    graph = BuiltGraph(
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
        values=values,
        reference=model if options.verify_sessions else b"",
    )
    if spec.session.graph_optimization == "disable":
        return graph
    if spec.in_order:
        graph = _optimized_in_order(graph, lowered.model, spec)
    built(BuildStage(name, gm, "optimized", None, partial(_optimized, graph, spec)))
    return graph


def _serialised(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


def _optimized(graph: BuiltGraph, spec: BuildSpec) -> bytes:
    return graph.model if spec.in_order else optimize(graph, spec.target, spec.device)


def drop_unread(lowered: Lowered) -> tuple[ValueSpec, ...]:
    """Drop the inputs that no node of a model reads, such as the bias of a layer norm from the gradient of this."""
    graph = lowered.model.graph
    read = [bool(value.uses()) or value.is_graph_output() for value in graph.inputs]
    kept = [value for value, is_read in zip(graph.inputs, read, strict=True) if is_read]
    graph.inputs.clear()
    graph.inputs.extend(kept)
    both = zip(lowered.inputs, read, strict=True)
    return tuple(spec if is_read else dataclasses.replace(spec, is_read=False) for spec, is_read in both)


def _origins(gm: GraphModule, model: ir.Model) -> dict[str, int]:
    """Name of an ONNX node that data can stop -> index of the FX node that it was lowered from."""
    indices = {node.name: index for index, node in enumerate(gm.graph.nodes)}
    stopped = (node for node in model.graph.all_nodes() if node.name and node.op_type.startswith(_STOPPED_BY_DATA))
    makers = {str(node.name): fx_node_name(node.metadata_props) for node in stopped}
    return {name: indices[maker] for name, maker in makers.items() if maker in indices}


def _values(gm: GraphModule, model: ir.Model) -> dict[str, int]:
    """Map names of values in a model to the index of the FX node that gives each, a getitem of one of several results.

    Values that the node's own lowering casts to it follow: a pass that removes the cast leaves them.
    """
    names: dict[str, int] = {}
    for index, node in enumerate(gm.graph.nodes):
        if node.target is operator.getitem:
            maker, item = node.args
            names[f"{maker}.{item}"] = index
        elif node.op == "call_function":
            names[node.name] = index
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    found = {name: index for name, index in names.items() if name in values}
    for name, index in list(found.items()):
        node = values[name].producer()
        while node is not None and node.op_type == "Cast":
            (source,) = node.inputs
            before = source.producer() if source is not None else None
            if before is None or before.metadata_props.get(FX_NODE) != node.metadata_props.get(FX_NODE):
                break
            assert source is not None
            found.setdefault(str(source.name), index)
            node = before
    return found


_STOPPED_BY_DATA = ("Gather", "Scatter")
"""Name prefixes of operators whose kernels check indices. A zero divisor stops a Gather, too."""


def _optimized_in_order(built: BuiltGraph, lowered: ir.Model, spec: BuildSpec) -> BuiltGraph:
    """Optimize `built` by ONNX Runtime, and put its nodes back in the order that they had.

    Without a temporary file for that, it runs in ONNX Runtime's own order, and no other graph shares it.
    """
    watch = _Watch()
    stage("optimizing in ONNX Runtime")
    try:
        written = optimize(built, spec.target, spec.device)
    except OSError as error:
        _log.warning(
            "ort_train: %s needs more memory than usual, because its operators run in ONNX Runtime's own order: "
            "a temporary file cannot be written: %s. Make room, or set TMPDIR to another folder.",
            built.name,
            error,
        )
        return dataclasses.replace(built, in_order=False, keyable=False)
    optimized = ir.from_proto(onnx.ModelProto.FromString(written))
    passes = run_passes(order_passes(lowered), optimized, check=spec.dump.verify, folder=spec.dump.save_onnx)
    model = _serialised(optimized)
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
