"""Runs ONNX models of islands with chosen values as outputs, without ONNX Runtime's optimizers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch.fx import GraphModule, Node

from ort_dynamo.graph.boundary import ValueSpec
from ort_dynamo.graph.build import BuildSpec, BuiltGraph, built_of
from ort_dynamo.graph.dtypes import ONNX_TO_TORCH
from ort_dynamo.graph.marks import fx_node_name
from ort_dynamo.lowering.build_island import drop_unread
from ort_dynamo.lowering.translate import Lowered, lower
from ort_dynamo.passes.onnx.fuse_kernels import fused_ops
from ort_dynamo.runtime.compiled_graph import open_graph
from ort_dynamo.verification.in_double import InDouble

__all__ = ["LoweredIsland", "in_double", "nodes_of", "open_model", "plainly", "spell_nodes"]


class LoweredIsland:
    """An island lowered anew, with no pass run on it yet.

    Attributes:
        model: its model.
        inputs, outputs: how its values cross.
        values: FX node -> its ir.Value, or a tuple of them.

    Args:
        island: the island's graph.
        spec: all that decides how it is built.
    """

    def __init__(self, island: GraphModule, spec: BuildSpec) -> None:
        lowered: Lowered = lower(island, spec.target)
        self.inputs: tuple[ValueSpec, ...] = drop_unread(lowered)
        self.model: ir.Model = lowered.model
        self.outputs: tuple[ValueSpec, ...] = lowered.outputs
        self.values: Mapping[Node, Any] = lowered.values
        self._spec = spec

    def on(self, spec: BuildSpec) -> LoweredIsland:
        """Return the same model, to be opened in another way."""
        other = copy.copy(self)
        other._spec = spec
        return other

    def holding(self, model: ir.Model) -> LoweredIsland:
        """Return another model of the same inputs and outputs."""
        other = copy.copy(self)
        other.model = model
        return other

    def run(self, inputs: Sequence[Any], more: Sequence[ir.Value] = ()) -> tuple[torch.Tensor, ...]:
        """Run the model as it stands, and return its outputs and then the values `more`.

        Args:
            inputs: of the island.
            more: values of the main graph that are no outputs; the model is as it was afterwards.
        """
        outputs = self.model.graph.outputs
        count = len(outputs)
        outputs.extend(more)
        try:
            specs = (
                *self.outputs,
                *(ValueSpec(ONNX_TO_TORCH[value.dtype]) for value in more if value.dtype is not None),
            )
            return open_model(self.model, self._spec, self.inputs, specs)(*inputs)
        finally:
            del outputs[count:]


def open_model(model: ir.Model, spec: BuildSpec, inputs: tuple[ValueSpec, ...], outputs: tuple[ValueSpec, ...]) -> Any:
    """Open a model as it stands; returns a function of the island's inputs.

    Raises:
        SessionError: ONNX Runtime refused it.
    """
    settings = dataclasses.replace(spec.session, graph_optimization="disable", cuda_graphs=False)
    built: BuiltGraph = dataclasses.replace(
        built_of("verification", model, settings, fused_ops(model)), inputs=inputs, outputs=outputs
    )
    return open_graph(built, spec.target, spec.device).run


@contextmanager
def plainly() -> Iterator[None]:
    """Run operators as they are: without gradients and without the program's autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def in_double(operator: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of an operator in float64, or None where torch has no such kernel."""
    mode = InDouble()
    with plainly(), mode:
        results = operator(*args, **kwargs)
    return tuple(map(mode.read, results)) if isinstance(results, (tuple, list)) else mode.read(results)


def nodes_of(model: ir.Model, node: Node) -> list[ir.Node]:
    """List the ONNX nodes that an FX node became."""
    return [one for one in model.graph.all_nodes() if fx_node_name(one.metadata_props) == node.name]


def spell_nodes(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    """Spell ONNX nodes, one a line."""
    return tuple(map(_spell, nodes))


def _spell(node: ir.Node) -> str:
    made = ", ".join(str(value.name) for value in node.outputs)
    read = ", ".join(_argument(value) for value in node.inputs)
    attributes = ", ".join(
        f"{name}={attribute.value!r}" for name, attribute in node.attributes.items() if _is_short(attribute)
    )
    domain = f"{node.domain}." if node.domain else ""
    return f"{made} = {domain}{node.op_type}({read}){f' <{attributes}>' if attributes else ''}"


def _is_short(attribute: ir.Attr) -> bool:
    return attribute.type in (
        ir.AttributeType.INT,
        ir.AttributeType.FLOAT,
        ir.AttributeType.STRING,
        ir.AttributeType.INTS,
    )


def _argument(value: ir.Value | None) -> str:
    if value is None:
        return ""
    tensor = value.const_value
    if tensor is not None and tensor.size == 1:
        return str(tensor.numpy().reshape(()).item())
    return str(value.name)
