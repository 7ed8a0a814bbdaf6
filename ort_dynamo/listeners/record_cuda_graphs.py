"""Records graphs in CUDA graphs, which replay the same launches on the same addresses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch.fx import GraphModule

from ort_dynamo.compilation.events import BoxedRun, GraphCompilation, Listener
from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime.in_torch import InTorch
from ort_dynamo.runtime.session import CannotBeRecordedError
from ort_dynamo.torch_internals.cuda_graphs import (
    has_graph_trees,
    mutated_inputs,
    recorded,
    resting_inputs,
    running_backward,
    unsafe_node,
)

__all__ = ["RecordCudaGraphs", "why_not_recorded"]


class RecordCudaGraphs(Listener):
    """Records the graphs of a compile in CUDA graphs, if possible.

    A graph without launches, such as one on the CPU, has nothing to record, and that is no error: a model that trains
    on CUDA may have such a graph, and a program has to run unchanged on the CPU.

    Args:
        options: the options that enable the recording.
    """

    def __init__(self, options: SessionOptions) -> None:
        self._is_wanted = options.cuda_graphs
        self._forward_recorded = True
        self._resting: tuple[int, ...] = ()

    def segmented(self, graph: GraphCompilation) -> None:
        """Decide whether the graph is recorded; its sessions are opened for that."""
        if not (self._is_wanted and graph.target.facts.computes_on_streams):
            return
        self._resting = resting_inputs(graph.gm, graph.role)
        if graph.role == "backward" and not self._forward_recorded:
            self._give_up(graph, "its forward is not recorded, so what that saves lies elsewhere each time")
        elif reason := why_not_recorded(graph.gm, self._resting):
            self._give_up(graph, reason)

    def failed(self, graph: GraphCompilation, error: Exception) -> bool:
        """Open all sessions of a graph without a recording if one of them cannot be recorded."""
        if isinstance(error, CannotBeRecordedError):
            self._give_up(graph, str(error))
        return isinstance(error, CannotBeRecordedError)

    def finished(self, graph: GraphCompilation, run: BoxedRun) -> BoxedRun:
        """Give a function that records the graph, and replays it."""
        if not (self._is_wanted and graph.target.facts.computes_on_streams):
            return run
        if not graph.not_recorded:
            written = mutated_inputs(graph.gm)
            run = recorded(run, graph.gm, graph.role, graph.device, self._resting, written)
            return InTorch(graph.whole).around(run, graph.gm)  # a recording copies inputs, without tangents
        if graph.role == "backward" and self._forward_recorded:
            return running_backward(run, graph.device)
        return run

    def _give_up(self, graph: GraphCompilation, reason: str) -> None:
        graph.not_recorded = reason
        graph.spec = replace(graph.spec, session=replace(graph.spec.session, cuda_graphs=False))
        self._forward_recorded = self._forward_recorded and graph.role == "backward"


def why_not_recorded(gm: GraphModule, resting: Collection[int]) -> str | None:
    """Return the reason why a graph cannot be recorded, or None.

    Args:
        gm: a graph with fake values.
        resting: indices of the inputs whose addresses stay.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in sizes):
            return f"the sizes of {node.name} are dynamic (torch.compile(..., dynamic=False) makes one graph for each)"
    devices: dict[torch.device, str] = {}
    for node in gm.graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            devices.setdefault(value.device, node.name)
    if len(devices) != 1:
        return "not all of it is on one device: " + ", ".join(f"{name} on {device}" for device, name in devices.items())
    if not has_graph_trees():
        return "this torch has no CUDA graph trees"
    if node := unsafe_node(gm):
        return f"{node.target} ({node.name}) waits for the device, or has a size that data decides"
    if moving := sorted(mutated_inputs(gm) - set(resting)):
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        return f"it writes to an input that is neither a parameter nor a buffer: {names[moving[0]]}"
    return None
