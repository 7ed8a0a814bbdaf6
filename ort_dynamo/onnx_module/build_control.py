"""Builders of If, Loop and Scan: each subgraph becomes a program, with outer values as inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from onnx import AttributeProto, GraphProto, NodeProto, ValueInfoProto
from torch import fx

from ort_dynamo.onnx_module.build import Builder
from ort_dynamo.onnx_module.control_flow import IfNode, LoopNode, ScanNode
from ort_dynamo.onnx_module.host_values import Host
from ort_dynamo.onnx_module.program import Known, Program, Scope
from ort_dynamo.onnx_module.registry import InputKind
from ort_dynamo.onnx_module.size_limits import MOST_ELEMENTS
from ort_dynamo.onnx_module.tensor_data import element_type

__all__ = ["CONTROL"]

Attributes: TypeAlias = Mapping[str, AttributeProto]


def _subgraph(builder: Builder, node: NodeProto, scope: Scope, attributes: Attributes, name: str) -> GraphProto:
    found = attributes.get(name)
    if found is None or found.type != AttributeProto.GRAPH:
        raise builder.refusal(node, scope, f"the graph {name!r} is missing")
    return found.g


def _program(
    builder: Builder, outer: Program, scope: Scope, graph: GraphProto, hosts: bool
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Return the program of a graph, and the values that the program around has to give it after its own inputs."""
    program, inner = Program(outer), scope.inner()
    for one in graph.input:
        inner.define(one.name, program.placeholder("input", hosts))
    builder.add_constants(graph, inner)
    builder.add_nodes(program, graph.node, inner)
    outputs = [builder.argument(program, inner.find(output.name), InputKind.VALUE) for output in graph.output]
    return program.finish(outputs), program.outside()


def _outputs(program: Program, result: fx.Node, count: int) -> list[Known]:
    """Return the entries of a tuple; each may be a Host, as the graphs may compute one."""
    found: list[Known] = [program.call(operator.getitem, (result, at)) for at in range(count)]
    program.maybe_host.update(one for one in found if isinstance(one, fx.Node))
    return found


def _if(
    builder: Builder,
    program: Program,
    node: NodeProto,
    scope: Scope,
    inputs: Sequence[Known],
    attributes: Attributes,
) -> Sequence[Known]:
    then_graph = _subgraph(builder, node, scope, attributes, "then_branch")
    else_graph = _subgraph(builder, node, scope, attributes, "else_branch")
    if len(inputs) != 1 or inputs[0] is None or len(then_graph.output) != len(else_graph.output):
        raise builder.refusal(node, scope, "it needs a condition and two graphs with the same number of outputs")
    condition = builder.argument(program, inputs[0], InputKind.SETTING)
    if isinstance(condition, Host):
        chosen = then_graph if condition.values[0] else else_graph
        inner = scope.inner()
        builder.add_constants(chosen, inner)
        builder.add_nodes(program, chosen.node, inner)
        return [inner.find(output.name) for output in chosen.output]
    then_branch, for_then = _program(builder, program, scope, then_graph, False)
    else_branch, for_else = _program(builder, program, scope, else_graph, False)
    result = program.call_module(
        IfNode(then_branch, else_branch), (program.root, condition, tuple(for_then), tuple(for_else))
    )
    return _outputs(program, result, len(then_graph.output))


def _loop(
    builder: Builder,
    program: Program,
    node: NodeProto,
    scope: Scope,
    inputs: Sequence[Known],
    attributes: Attributes,
) -> Sequence[Known]:
    body = _subgraph(builder, node, scope, attributes, "body")
    carried = len(body.input) - 2
    if len(inputs) != carried + 2 or carried < 0 or len(body.output) < carried + 1 or None in inputs[2:]:
        raise builder.refusal(node, scope, "its inputs and outputs do not match its body")
    trips, condition = (builder.argument(program, one, InputKind.SETTING) for one in inputs[:2])
    if isinstance(trips, Host) and trips.values and trips.values[0] > MOST_ELEMENTS:
        raise builder.refusal(node, scope, f"it asks for {trips.values[0]} iterations; at most {MOST_ELEMENTS}")
    if trips is None and (condition is None or isinstance(condition, Host)) and _goes_on(body):
        raise builder.refusal(node, scope, "it never ends")
    state = [builder.argument(program, one, InputKind.VALUE) for one in inputs[2:]]
    empty = [_type_of(output) for output in body.output[1 + carried :]]
    inner, outside = _program(builder, program, scope, body, True)
    result = program.call_module(
        LoopNode(inner, carried, empty),
        (program.root, trips, condition, tuple(state), tuple(outside), program.local(builder.device)),
    )
    return _outputs(program, result, len(body.output) - 1)


def _goes_on(body: GraphProto) -> bool:
    """Check whether a body returns its input condition unchanged."""
    names = {body.input[1].name}
    for node in body.node:
        if node.op_type == "Identity" and node.input and node.input[0] in names:
            names.update(node.output)
    return body.output[0].name in names


def _type_of(output: ValueInfoProto) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return the dtype and shape that a body claims for an output; None if it claims none."""
    if not output.type.HasField("tensor_type"):
        return None
    kind = output.type.tensor_type
    shape = tuple(max(dim.dim_value, 0) for dim in kind.shape.dim)
    return element_type(kind.elem_type, f"the output {output.name!r}"), shape


def _integers(attributes: Attributes, name: str, count: int) -> list[int]:
    found = attributes.get(name)
    return [0] * count if found is None else list(found.ints)


def _scan(
    builder: Builder,
    program: Program,
    node: NodeProto,
    scope: Scope,
    inputs: Sequence[Known],
    attributes: Attributes,
) -> Sequence[Known]:
    body = _subgraph(builder, node, scope, attributes, "body")
    if scope.opsets.get("", 0) < 9:
        raise builder.refusal(node, scope, "Scan is supported from opset 9 on")
    count = attributes["num_scan_inputs"].i if "num_scan_inputs" in attributes else 0
    carried, stacked = len(inputs) - count, len(body.output) - (len(inputs) - count)
    if count < 1 or carried < 0 or stacked < 0 or len(body.input) != len(inputs) or None in inputs:
        raise builder.refusal(node, scope, "its inputs and outputs do not match its body")
    lists = [
        _integers(attributes, name, length)
        for name, length in (
            ("scan_input_axes", count),
            ("scan_input_directions", count),
            ("scan_output_axes", stacked),
            ("scan_output_directions", stacked),
        )
    ]
    if [len(one) for one in lists] != [count, count, stacked, stacked]:
        raise builder.refusal(node, scope, "an attribute does not have one number for each input or output")
    state = [builder.argument(program, one, InputKind.VALUE) for one in inputs[:carried]]
    sequences = [builder.tensor(program, one, "a sequence") for one in inputs[carried:]]
    inner, outside = _program(builder, program, scope, body, True)
    module = ScanNode(
        inner, carried, lists[0], [bool(one) for one in lists[1]], lists[2], [bool(one) for one in lists[3]]
    )
    result = program.call_module(
        module, (program.root, tuple(state), tuple(sequences), tuple(outside), program.local(builder.device))
    )
    return _outputs(program, result, len(body.output))


CONTROL: dict[str, Callable[..., Sequence[Known]]] = {"If": _if, "Loop": _loop, "Scan": _scan}
"""Functions that write the nodes that have graphs."""
