"""Runs one ATen operator alone in ONNX Runtime, and compares it with torch: as the files that repeat a fault do."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import getitem
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import torch
from torch.fx import Graph, GraphModule, Node

from ort_dynamo.errors import OrtDynamoError
from ort_dynamo.graph.boundary import fed
from ort_dynamo.graph.build import BuildSpec
from ort_dynamo.options.groups import DumpOptions, SessionOptions
from ort_dynamo.runtime.installed.providers import usable_target
from ort_dynamo.torch_internals.fakes import FakeTensorMode
from ort_dynamo.torch_internals.pytree import tree_map
from ort_dynamo.torch_internals.tracing.lazy_code import graph_module
from ort_dynamo.verification.compare import first_problem
from ort_dynamo.verification.models import LoweredIsland, in_double, plainly, spell_nodes

__all__ = ["Alone", "run_alone"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Alone:
    """An operator with its arguments, run alone.

    Attributes:
        problem: how ONNX Runtime's result differs from torch's; "" where it agrees.
        nodes: the ONNX nodes that ran.
        culprit: "lowering" or "kernel"; "lowering or kernel" where nothing else can run these nodes.
    """

    problem: str
    nodes: tuple[str, ...]
    culprit: str


def run_alone(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: Sequence[int] | None = None
) -> Alone:
    """Run an operator alone in torch and in ONNX Runtime, and compare.

    Args:
        operator: an overload with a lowering.
        args, kwargs: its arguments.
        read: of an operator with several results, the indices of those that count; None is all.

    Raises:
        LoweringError: its lowering failed.
    """
    gm, inputs, device = _graph(operator, args, kwargs, read)
    spec = _spec(device)
    island = LoweredIsland(gm, spec)
    with plainly():
        found = island.run(inputs)
        expected = _chosen(operator(*args, **kwargs), read)
    exact = _chosen(in_double(operator, args, kwargs), read)
    problem = first_problem(found, expected, lambda: exact, inputs=inputs)
    nodes = spell_nodes(island.model.graph.all_nodes())
    culprit = _culprit(island, spec, inputs, expected, exact) if problem else ""
    return Alone(problem, nodes, culprit)


def _spec(device: torch.device) -> BuildSpec:
    """Return how to build an island for a device, without passes and ONNX Runtime's optimizers."""
    target = usable_target(device.type)
    session = SessionOptions(graph_optimization="disable").resolved(on_cuda=target.facts.computes_on_streams)
    return BuildSpec((), session, DumpOptions(), target, device, in_order=False)


def _chosen(results: Any, read: Sequence[int] | None) -> list[Any]:
    if not isinstance(results, (tuple, list)):
        return [results]
    return [results[index] for index in (range(len(results)) if read is None else read)]


def _graph(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: Sequence[int] | None
) -> tuple[GraphModule, list[torch.Tensor], torch.device]:
    """Make a graph of one operator, with fake values; its tensors are its inputs."""
    graph, mode, inputs = Graph(), FakeTensorMode(), list[torch.Tensor]()

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(inputs)}")
        node.meta["val"] = mode.from_tensor(value.detach(), static_shapes=True)
        inputs.append(value.detach())
        return node

    placed_args, placed_kwargs = tree_map(place, (tuple(args), dict(kwargs)))
    node = graph.call_function(operator, placed_args, placed_kwargs)
    fakes = torch.fx.node.map_arg((placed_args, placed_kwargs), lambda one: one.meta["val"])
    with mode, torch.no_grad():
        node.meta["val"] = operator(*fakes[0], **fakes[1])
    graph.output(tuple(_results(graph, node, read)))
    device = next((one.device for one in inputs), torch.device("cpu"))
    return graph_module({}, graph), inputs, device


def _results(graph: Graph, node: Node, read: Sequence[int] | None) -> list[Node]:
    fakes = node.meta["val"]
    if not isinstance(fakes, (tuple, list)):
        return [node]
    found = []
    for index in range(len(fakes)) if read is None else read:
        item = graph.call_function(getitem, (node, index))
        item.meta["val"] = fakes[index]
        found.append(item)
    return found


def _culprit(
    island: LoweredIsland, spec: BuildSpec, inputs: Sequence[Any], expected: Sequence[Any], exact: Sequence[Any]
) -> str:
    """Find whether ONNX nodes are right, by other kernels: the CPU's for CUDA, else those of ONNX's own reference."""
    for other in (_on_the_cpu, _by_reference):
        found = other(island, spec, inputs)
        if found is not None:
            on_cpu, wide = _moved_to_cpu(expected), _moved_to_cpu(exact)
            return "lowering" if first_problem(found, on_cpu, partial(list, wide), inputs=inputs) else "kernel"
    return "lowering or kernel"


def _moved_to_cpu(values: Sequence[Any]) -> list[Any]:
    """Return values with their tensors on the CPU."""
    return [one.cpu() if isinstance(one, torch.Tensor) else one for one in values]


def _on_the_cpu(island: LoweredIsland, spec: BuildSpec, inputs: Sequence[Any]) -> Sequence[Any] | None:
    if spec.device.type == "cpu":
        return None
    try:
        return island.on(_spec(torch.device("cpu"))).run(_moved_to_cpu(inputs))
    except OrtDynamoError:  # it has no such kernel
        return None


def _by_reference(island: LoweredIsland, spec: BuildSpec, inputs: Sequence[Any]) -> Sequence[Any] | None:
    """Run the model by ONNX's reference implementation; None where this lacks an operator or a dtype."""
    read = [fed(one, way) for one, way in zip(inputs, island.inputs, strict=True) if way.is_read]
    names = [str(value.name) for value in island.model.graph.inputs]
    try:
        evaluator = onnx.reference.ReferenceEvaluator(ir.to_proto(island.model))
        arrays = evaluator.run(None, {name: _array(one) for name, one in zip(names, read, strict=True)})
    except Exception as error:  # whatever numpy raises, and errors of its own for operators that it lacks
        _log.debug("ONNX's reference cannot run %s: %s", island.model.graph.name, error)
        return None
    found = list(map(_tensor, arrays))
    return [
        one.permute([way.order.index(axis) for axis in range(len(way.order))]) if way.order else one
        for one, way in zip(found, island.outputs, strict=True)
    ]


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ir.DataType.BFLOAT16.numpy())
    return tensor.numpy()


def _tensor(array: Any) -> torch.Tensor:
    if array.dtype == ir.DataType.BFLOAT16.numpy():
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.as_tensor(array)
