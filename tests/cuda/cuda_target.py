"""Compile for CUDA without a device: a program's graphs up to the sessions, which never open.

torch without CUDA can trace no gradient of a CUDA tensor. So a program is traced on the CPU, and each graph goes to
CUDA before anything of ours looks at it: its fake tensors, and the devices that its nodes name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from attention_on_cuda import attend_as_on_cuda
from torch.fx import GraphModule
from torch.utils._pytree import tree_map

from ort_dynamo import backend
from ort_dynamo.cache import open_island
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.compilation import choose_target, cut
from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.graph.fused_op import DOMAIN, FusedOp
from ort_dynamo.options.groups import parse_options
from ort_dynamo.report.record import CompileRecord
from ort_dynamo.targets.target import OPSET, Target
from ort_dynamo.torch_internals.fakes import FakeTensor

__all__ = ["Compiled", "autocast", "bound_dtypes", "compiled_for", "kernels_lacking", "value_types"]

_CUDA = torch.device("cuda", 0)


@dataclass
class Compiled:
    """The compiled models with their fused kernels, as a session would get them, and the records of the compiles."""

    models: list[onnx.ModelProto] = field(default_factory=list)
    kernels: list[tuple[FusedOp, ...]] = field(default_factory=list)
    records: list[CompileRecord] = field(default_factory=list)

    @property
    def eager(self) -> dict[str, str]:
        """Overload -> reason of its fallback."""
        return {str(n.target): n.reason for r in self.records for graph in r.graphs for n in graph.eager}


@contextmanager
def compiled_for(target: Target, **given: Any) -> Iterator[tuple[Callable[..., Any], Compiled]]:
    """Give a backend for torch.compile that compiles for `target` and runs eager, and its compiled models.

    Args:
        target: a CUDA target.
        given: options, by their names.
    """
    found = Compiled()

    def open_graph(built: BuiltGraph, *, target: Target, device: torch.device, store: object) -> Any:
        assert device == _CUDA
        found.models.append(onnx.ModelProto.FromString(built.model))
        found.kernels.append(tuple(built.kernels))
        return SimpleNamespace(built=built, run=None)

    def marked(gm: GraphModule, *args: Any) -> Any:
        attend_as_on_cuda(gm)
        move(gm)
        return mark(gm, *args)

    def in_eager(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        found.records.append(backend.compile_recorded(gm, inputs, options)[1])
        return gm.forward

    CACHE.clear()  # its entries would not be opened
    options, mark = parse_options(None, given), cut.mark
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose_target, "usable_target", lambda _: target)
        patch.setattr(choose_target, "kernels_work", lambda _: True)
        patch.setattr(backend, "session_device", lambda *_: _CUDA)
        patch.setattr(cut, "mark", marked)
        patch.setattr(open_island, "open_graph", open_graph)
        yield in_eager, found


@contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast of the CPU, with layer norms and group norms in float32 as autocast of CUDA has them."""
    if dtype == torch.float32:
        yield
        return

    def layer(self: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias, self.eps)

    def group(self: torch.nn.GroupNorm, x: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x.float(), self.num_groups, self.weight, self.bias, self.eps)

    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", dtype):
        patch.setattr(torch.nn.LayerNorm, "forward", layer)  # a mix has no kernel there
        patch.setattr(torch.nn.GroupNorm, "forward", group)
        yield


def move(gm: GraphModule) -> None:
    """Move a graph's fake tensors and the device arguments of its nodes to CUDA."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return _CUDA
        if not isinstance(value, FakeTensor):
            return value
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, meta, _CUDA)

    for node in gm.graph.nodes:
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])


def kernels_lacking(model: onnx.ModelProto, target: Target) -> Counter[str]:
    """The nodes of a model, counted, that no kernel of the target takes: "Operator, type variable=dtype …"."""
    return _lacking(model.graph, {}, target)


def value_types(graph: onnx.GraphProto) -> dict[str, int]:
    """Value -> its element type, of those that a graph states."""
    values = (*graph.input, *graph.output, *graph.value_info)
    return {v.name: v.type.tensor_type.elem_type for v in values} | {t.name: t.data_type for t in graph.initializer}


def _lacking(graph: onnx.GraphProto, around: dict[str, int], target: Target) -> Counter[str]:
    types = around | value_types(graph)
    lacking: Counter[str] = Counter()
    for node in graph.node:
        if node.domain == DOMAIN:
            continue  # a fused kernel, or a function of the model
        bound = bound_dtypes(node, types)
        if not target.takes(node.op_type, node.domain, bound):
            said = " ".join(f"{variable}={dtype.name}" for variable, dtype in bound.items())
            lacking[f"{node.op_type}, {said}"] += 1
        for attribute in node.attribute:
            if attribute.HasField("g"):
                lacking += _lacking(attribute.g, types, target)
    return lacking


def bound_dtypes(node: onnx.NodeProto, types: dict[str, int]) -> dict[str, ir.DataType]:
    """Type variable -> dtype of a node's inputs and outputs; only T for com.microsoft, whose schemas onnx lacks."""
    if node.domain:
        return {"T": ir.DataType(types[node.input[0]])} if node.input else {}
    schema = onnx.defs.get_schema(node.op_type, OPSET)
    found = {}
    for names, formals in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for index, name in enumerate(names):
            formal = formals[min(index, len(formals) - 1)]
            if name and "(" not in formal.type_str and formal.is_homogeneous:
                found[formal.type_str] = ir.DataType(types[name])
    return found
