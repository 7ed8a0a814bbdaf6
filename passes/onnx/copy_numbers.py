"""Copy numbers from the host to the device by a kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from ort_dynamo.graph.fused_op import DOMAIN, ITSELF
from ort_dynamo.graph.marks import PASS
from ort_dynamo.passes.onnx.analysis.host_values import MEASURES, host_nodes, is_host_number
from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.passes.onnx.analysis.subgraphs import subgraphs_of
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.passes.onnx.fused_kernels.kernel import Kernel
from ort_dynamo.passes.onnx.fused_kernels.made import fused_kernels
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["CopyNumbers"]

_READERS = frozenset({
    "Add", "And", "Cast", "Clip", "Div", "Equal", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual",
    "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Or", "Pow", "ScatterElements", "ScatterND", "Sub", "Where",
    "Xor",
})  # fmt: skip
"""Operators that read all inputs on the device, as the provider of 1.19.2 and 1.31.1 places them."""


@ordering(needs=[Condition.CASTS_MOVED])
@dataclass(frozen=True)
class CopyNumbers(ir.passes.InPlacePass):
    """Give a node that computes with an int64 of sizes a copy of it on the device: Range(n, n + 1), squeezed.

    The kernel of Range takes its arguments on the host. Without it, ONNX Runtime would leave to the CPU every node that
    reads the number and, besides, inputs of the graph alone, however large they are (GetCpuPreferredNodes in
    fallback_cpu_capability.cc). A fused kernel has no form for the CPU, so the session would not open.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the nodes that read a number of the main graph; those in branches read it there, too."""
        if not any(node.op_type in MEASURES for node in model.graph):
            return ir.passes.PassResult(model, False)
        infer_missing_types(model, shapes=True)
        copies: dict[ir.Value, ir.Value] = {}
        copied = partial(_copied, NewValues(model, self), repr(self))
        host, kernels = host_nodes(model.graph), fused_kernels(model)
        for node in list(model.graph):
            inner = (one for graph in subgraphs_of(node) for one in graph.all_nodes())
            readers = (one for one in (node, *inner) if one not in host and _reads_on_device(one))
            for reader in readers:
                for index, value in _numbers(reader, kernels, model.graph):
                    if value not in copies:
                        copies[value] = copied(value, partial(model.graph.insert_before, node))
                    reader.replace_input_with(index, copies[value])
        return ir.passes.PassResult(model, bool(copies))


def _reads_on_device(node: ir.Node) -> bool:
    return node.op_type in _READERS if not node.domain else node.domain == DOMAIN


def _numbers(node: ir.Node, kernels: Mapping[str, Kernel], graph: ir.Graph) -> list[tuple[int, ir.Value]]:
    """List the inputs of a node that are numbers made of sizes in a graph, but for arguments of a kernel's launch."""
    symbols = kernels[node.op_type].symbols if node.domain == DOMAIN else ()
    return [
        (index, value)
        for index, value in enumerate(node.inputs)
        if value is not None
        and value.graph is graph
        and value.producer() is not None  # an input that is a number is fed
        and (index, ITSELF) not in symbols
        and is_host_number(value)
    ]


def _copied(new: NewValues, made_by: str, value: ir.Value, insert: Callable[[list[ir.Node]], None]) -> ir.Value:
    """Add the nodes that copy a number of any rank, and return the copy."""
    nodes: list[ir.Node] = []

    def add(op: str, inputs: list[ir.Value], shape: list[int]) -> ir.Value:
        node = ir.node(op, inputs, metadata_props={PASS: made_by})
        (result,) = node.outputs
        result.name, result.type, result.shape = new.name(f"{value.name}_{op}"), value.type, ir.Shape(shape)
        node.name = result.name
        nodes.append(node)
        return result

    rank = len(value.shape or ())
    one = new.shared_constant("one", np.array(1, np.int64))
    number = add("Reshape", [value, new.shape(())], []) if rank else value
    copy = add("Range", [number, add("Add", [number, one], []), one], [1])
    if rank != 1:
        copy = add("Reshape", [copy, new.shape([1] * rank)], [1] * rank)
    insert(nodes)
    return copy
