"""One graph, from FX to a callable: the page to read first.

`compile_graph` is what AOTAutograd calls for the forward, the backward and the inference graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch.fx import GraphModule

from ort_dynamo.runtime.boxed import Island, boxed
from ort_dynamo.cache.memory import MemoryCache
from ort_dynamo.dump import dump_model
from ort_dynamo.graph_key import graph_key
from ort_dynamo.lowering.registry import outside_lowerings
from ort_dynamo.lowering.translate import lower, refusal
from ort_dynamo.options import Options
from ort_dynamo.passes.onnx.restore_order import RestoreOrder
from ort_dynamo.passes.pipelines import identity, onnx_passes
from ort_dynamo.report import report
from ort_dynamo.results import own_results
from ort_dynamo.runtime.compiled_graph import CompiledGraph
from ort_dynamo.runtime.providers import find_target
from ort_dynamo.runtime.session import open_session, optimize
from ort_dynamo.segment.segment import check_fallback, segment, session_device
from ort_dynamo.target import Target

__all__ = ["CACHE", "compile_graph", "compile_island"]

CACHE: MemoryCache[CompiledGraph] = MemoryCache()


def compile_graph(
    gm: GraphModule, role: str, options: Options, seen: slice = slice(None)
) -> Callable[[list[Any]], Any]:
    """Compile one functional ATen graph.

    Args:
        gm: the graph, with fake values in meta["val"].
        role: "forward", "backward" or "inference"; for messages and file names.
        options: all options.
        seen: which outputs the program gets to see.

    Returns:
        A function of one list of inputs, which it empties so that each input is freed after its last use.
    """
    device = session_device(gm)
    target = find_target(device.type)
    segmented = segment(gm, partial(refusal, target=target), device)
    report(segmented, role)
    check_fallback(segmented, options.segment, role)
    pipeline = identity(onnx_passes(options.passes, target))
    in_order = role == "backward" and device.type == "cpu"  # its order decides how much is alive at once
    for name, island in segmented.islands.items():
        outside = outside_lowerings(island)
        context = (pipeline, options.session.resolved(), options.dump, target, device, f"in_order={in_order}")
        key = graph_key(island, *context, functions=outside)
        called = f"{role}-{key or 'unkeyed'}"
        make = partial(compile_island, island, called, options, target, device, in_order=in_order)
        compiled = CACHE.get_or_make(key, make)
        segmented.gm.set_submodule(name, Island(compiled))
    own_results(segmented.gm, seen)
    return boxed(segmented.gm)


def compile_island(
    gm: GraphModule, name: str, options: Options, target: Target, device: torch.device, *, in_order: bool
) -> CompiledGraph:
    """Lower, rewrite and open one island, every node of which the target takes; errors and files call it `name`."""
    lowered = lower(gm, target)
    for pass_ in onnx_passes(options.passes, target):
        pass_(lowered.model)
    model = ir.to_proto(lowered.model).SerializeToString()
    dump_model(model, options.dump, name)
    settings = options.session.resolved()
    dtypes = {value.dtype for node in lowered.model.graph for value in node.outputs if value.dtype is not None}
    if in_order and settings.graph_optimization != "disable":
        optimized = ir.from_proto(onnx.ModelProto.FromString(optimize(model, settings, target, device, name, dtypes)))
        RestoreOrder.of(lowered.model)(optimized)
        model = ir.to_proto(optimized).SerializeToString()
        settings = dataclasses.replace(settings, graph_optimization="disable")
    session = open_session(model, settings, target, device, name, dtypes, in_order=in_order)
    return CompiledGraph(session, lowered.inputs, lowered.outputs, device)
