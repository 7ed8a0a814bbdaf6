"""Operators that ONNX defines by others, as these others."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import onnx_ir as ir
from onnx.inliner import inline_selected_functions
from onnx.shape_inference import infer_shapes
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ort_dynamo.passes.onnx.opsets.building import Builder, InexpressibleError

__all__ = ["body_model", "splice"]


def body_model(node: ir.Node, schema: onnx.defs.OpSchema, version: int) -> ir.Model | None:
    """A model that does what a node does, by the definition of its operator; None where ONNX defines it by itself.

    Its inputs are the node's, once each and in order, its outputs the node's; its opset is the oldest that has the
    operator and is not older than `version`.

    Raises:
        InexpressibleError: the type of an input is not known, without which the definition is not.
    """
    if not (schema.function_opset_versions or schema.context_dependent_function_opset_versions):
        return None
    if any(
        attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()
    ):
        return None  # its body reads values of this model
    inputs = list(dict.fromkeys(value for value in node.inputs if value is not None))
    if any(value.type is None for value in inputs):
        raise InexpressibleError("it stands for other operators, and which depends on a type that is not known")
    opset = max(schema.since_version, version)
    described = [_described(value) for value in inputs], [_described(value) for value in node.outputs if value.name]
    graph = onnx.helper.make_graph([ir.to_proto(node)], "body", *described)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    inlined = inline_selected_functions(model, [("", node.op_type)], exclude=False, inline_schema_functions=True)
    if any(one.op_type == node.op_type for one in inlined.graph.node):
        return None  # the definition does not cover these types or attributes
    body = ir.from_proto(infer_shapes(inlined))
    RemoveUnusedNodesPass()(body)
    return body


def splice(body: ir.Model, node: ir.Node, make: Builder) -> list[ir.Value]:
    """Move the nodes of a node's `body_model` to `make`, and give what stands for the node's outputs."""
    graph = body.graph
    inputs = dict.fromkeys(value for value in node.inputs if value is not None)
    for inner, outer in zip(tuple(graph.inputs), inputs, strict=True):
        ir.convenience.replace_all_uses_with(inner, outer)
    results: Iterator[ir.Value] = iter(tuple(graph.outputs))
    graph.outputs.clear()
    nodes = tuple(graph)
    graph.remove(nodes)
    for one in nodes:
        make.take(one, one.op_type)
    return [next(results) if value.name else value for value in node.outputs]


def _described(value: ir.Value) -> onnx.ValueInfoProto:
    return ir.to_proto(ir.Value(name=value.name, type=value.type, shape=value.shape))
