"""CUDA's forms on the CPU's kernels: graphs are placed and lowered for a CUDA target, and run on the CPU.

The target has the facts, the defects and the kernels of CUDA. Tensors and sessions are the CPU's, so each result can be
compared with eager's. Where a form has a node of a half type that the CPU has no kernel for, the node computes in
float32 between casts, as CUDA's kernels do inside. A node that still has no CPU kernel cannot run: `NoKernelError`
names it. Sessions open without ONNX Runtime's optimizers, so the form itself runs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from attention_on_cuda import attend_as_on_cuda
from cpu_attention import attention_on_the_cpu
from cuda_target import bound_dtypes, kernels_lacking, value_types
from fused_on_cpu import fused_on_the_cpu
from torch.fx import GraphModule

from ort_dynamo.cache import open_island as opened_islands
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.compilation import choose_target, cut
from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.graph.fused_op import DOMAIN, ITSELF
from ort_dynamo.passes.onnx.analysis.host_values import MEASURES, READ_ON_HOST
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.passes.onnx.fused_kernels.kernel import Kernel
from ort_dynamo.runtime.compiled_graph import CompiledGraph, open_graph
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.runtime.installed.providers import find_target, recorded_cuda_targets
from ort_dynamo.targets.target import Target
from ort_dynamo.testing import patch_facts

__all__ = ["Forms", "NoKernelError", "cuda_forms", "cuda_target", "widened"]


class NoKernelError(Exception):
    """The CPU has no kernel for a node of a form of CUDA's, in no dtype that it could take."""


@dataclass
class Forms:
    """Counts of the nodes in the models that were opened.

    Attributes:
        operators: op type -> nodes.
        widened: "Operator, type variable=dtype …" -> nodes that compute in float32 between casts.
        lacking: the same of nodes that the CPU cannot run at all.
        left_to_cpu: the same as `operators`, of nodes that the CUDA provider would leave to the CPU.
        kernels: name of a fused operator -> its kernel.
    """

    operators: Counter[str] = field(default_factory=Counter)
    widened: Counter[str] = field(default_factory=Counter)
    lacking: Counter[str] = field(default_factory=Counter)
    left_to_cpu: Counter[str] = field(default_factory=Counter)
    kernels: dict[str, Kernel] = field(default_factory=dict)


@cache
def cuda_target(*, fused: bool = False) -> Target:
    """The CUDA target whose kernels are those of the installed build's nearest record."""
    training = installed_runtime().has_gradient_kernels
    found = next(target for target in recorded_cuda_targets() if target.is_training_build == training)
    return dataclasses.replace(found, fuses_kernels=fused)


@contextmanager
def cuda_forms(*, fused: bool = False, **facts: Any) -> Iterator[Forms]:
    """Have each compile inside take the CPU's tensors for those of CUDA, but for where they are.

    Args:
        fused: whether groups of nodes become fused kernels, which run in their NumPy form.
        facts: properties of the target that are other than CUDA's.
    """
    found, cpu, mark = Forms(), find_target("cpu"), cut.mark

    def opened(built: BuiltGraph, *, target: Target, device: torch.device, store: object) -> CompiledGraph:
        assert device.type == "cpu"
        assert target.device_type == "cuda"
        model = onnx.ModelProto.FromString(built.model)
        found.operators.update(node.op_type for node in model.graph.node)
        found.left_to_cpu.update(left_to_cpu(model, found.kernels))
        found.widened += widened(model, cpu)
        lacking = kernels_lacking(model, cpu)
        found.lacking += lacking
        if lacking:
            raise NoKernelError(f"the CPU has no kernel for {', '.join(lacking)}")
        settings = dataclasses.replace(built.session, graph_optimization="disable")
        return open_graph(dataclasses.replace(built, model=model.SerializeToString(), session=settings), cpu, device)

    def marked(gm: GraphModule, *args: Any) -> Any:
        attend_as_on_cuda(gm)
        return mark(gm, *args)

    CACHE.clear()
    with pytest.MonkeyPatch.context() as patch, attention_on_the_cpu(), fused_on_the_cpu() as found.kernels:
        patch.setattr(choose_target, "usable_target", lambda _: cuda_target(fused=fused))
        patch.setattr(choose_target, "kernels_work", lambda _: True)
        patch.setattr(cut, "mark", marked)
        patch.setattr(opened_islands, "open_graph", opened)
        patch_facts(patch, **facts)
        yield found
    CACHE.clear()


def left_to_cpu(model: onnx.ModelProto, kernels: Mapping[str, Kernel]) -> Iterator[str]:
    """The nodes that ONNX Runtime's CUDA provider leaves to the CPU, but for those that only compute int64.

    It does so with a node that reads a value on the host, by an input that is not for the host, and besides constants
    and inputs of the graph alone (GetCpuPreferredNodes in fallback_cpu_capability.cc; half types are exempt).
    """
    read_model = ir.from_proto(model)
    infer_missing_types(read_model)
    graph = read_model.graph
    host: set[ir.Value] = set()
    for node in graph:
        if node.op_type in MEASURES:
            host.update(node.outputs)
            continue
        for_host = set(READ_ON_HOST.get(node.op_type, ()))
        if node.domain == DOMAIN:
            for_host = {index for index, axis in kernels[node.op_type].symbols if axis == ITSELF}
        read = [value for value in node.inputs if value is not None and ir.convenience.get_const_tensor(value) is None]
        plain = [value for index, value in enumerate(node.inputs) if value in host and index not in for_host]
        told = any(value in host for index, value in enumerate(node.inputs) if index in for_host)
        half = any(value.dtype in _HALF for value in read)
        if plain and not told and not half and all(value in host or value.is_graph_input() for value in read):
            host.update(node.outputs)
            if any(value.dtype != ir.DataType.INT64 for value in node.outputs):
                yield node.op_type


_FLOAT = onnx.TensorProto.FLOAT
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def widened(model: onnx.ModelProto, target: Target) -> Counter[str]:
    """Have nodes of half types that the target has no kernel for compute in float32 between casts, in place."""
    return _widen(model.graph, {}, target)


def _widen(graph: onnx.GraphProto, around: Mapping[str, int], target: Target) -> Counter[str]:
    types = {**around, **value_types(graph)}
    counts: Counter[str] = Counter()
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(list(graph.node)):
        for attribute in node.attribute:
            if attribute.HasField("g"):
                counts += _widen(attribute.g, types, target)
        bound = bound_dtypes(node, types)
        wide = {name: ir.DataType.FLOAT if dtype in _HALF else dtype for name, dtype in bound.items()}
        if target.takes(node.op_type, node.domain, bound) or not target.takes(node.op_type, node.domain, wide):
            nodes.append(node)
            continue
        counts[f"{node.op_type}, {' '.join(f'{name}={dtype.name}' for name, dtype in bound.items())}"] += 1
        made = _between_casts(node, types, f"{graph.name}_{index}")
        between = {name for cast in made for name in (*cast.input, *cast.output)} - {*node.input, *node.output}
        graph.value_info.extend(onnx.helper.make_tensor_value_info(name, _FLOAT, None) for name in sorted(between))
        nodes += made
    del graph.node[:]
    graph.node.extend(nodes)
    return counts


def _between_casts(node: onnx.NodeProto, types: Mapping[str, int], label: str) -> list[onnx.NodeProto]:
    """The node, with a cast before each float16 or bfloat16 input, and one after each such result."""
    wide, before, after = onnx.NodeProto.FromString(node.SerializeToString()), [], []
    for place, name in enumerate(node.input):
        if name and types[name] in _HALF:
            wide.input[place] = f"{label}_in_{place}"
            before.append(onnx.helper.make_node("Cast", [name], [wide.input[place]], to=_FLOAT))
    for place, name in enumerate(node.output):
        if name and types[name] in _HALF:
            wide.output[place] = f"{label}_out_{place}"
            after.append(onnx.helper.make_node("Cast", [wide.output[place]], [name], to=types[name]))
    return [*before, wide, *after]
