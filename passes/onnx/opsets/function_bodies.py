"""Operators that ONNX defines by others, as these others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx.inliner import inline_local_functions
from onnx.shape_inference import infer_shapes
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ort_dynamo.passes.onnx.opsets.building import Builder, InexpressibleError

__all__ = ["body_model", "splice"]

_LOCAL = "definition"
"""Domain of the function that an operator is made for a moment."""


def body_model(node: ir.Node, schema: onnx.defs.OpSchema, version: int) -> ir.Model | None:
    """Return a model that computes a node, by the definition of its operator; None where ONNX defines it by itself.

    Its inputs are the node's, once each and in order, its outputs the node's. Its opset is the newest that ONNX has a
    definition for and that is not newer than `version`; where there is none, the oldest.

    Raises:
        InexpressibleError: the type of an input is not known, without which the definition is not.
    """
    if not _is_defined(schema):
        return None
    if any(one.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for one in node.attributes.values()):
        return None  # its body reads values of this model
    inputs = list(dict.fromkeys(value for value in node.inputs if value is not None))
    if any(value.type is None for value in inputs):
        raise InexpressibleError("it may stand for others, which depend on a type that is not known")
    call = ir.to_proto(node)
    given = {attribute.name for attribute in call.attribute}
    call.attribute.extend(
        known.default_value
        for name, known in schema.attributes.items()
        if name not in given and known.default_value.name
    )
    function = _definition(call, schema, node.inputs, version)
    if function is None:
        return None
    (opset,) = (entry.version for entry in function.opset_import if not entry.domain)
    call.domain = function.domain = _LOCAL
    function.name = call.op_type
    graph = onnx.helper.make_graph(
        [call],
        "body",
        [_described(value) for value in inputs],
        [_described(value) for value in node.outputs if value.name],
    )
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid(_LOCAL, 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, functions=[function])
    body = ir.from_proto(infer_shapes(inline_local_functions(model)))
    RemoveUnusedNodesPass()(body)
    return body


def _is_defined(schema: Any) -> bool:
    return bool(schema.function_opset_versions or schema.context_dependent_function_opset_versions)


def _definition(
    call: onnx.NodeProto, schema: Any, inputs: Sequence[ir.Value | None], version: int
) -> onnx.FunctionProto | None:
    """ONNX's definition of an operator; `schema` is an OpSchema, whose stubs lack attributes that are read here."""
    if versions := schema.function_opset_versions:
        text = schema.get_function_with_opset_version(_nearest(versions, version))
    else:
        versions = schema.context_dependent_function_opset_versions
        types = [(onnx.TypeProto() if one is None else _described(one).type).SerializeToString() for one in inputs]
        nearest = _nearest(versions, version)
        text = schema.get_context_dependent_function_with_opset_version(nearest, call.SerializeToString(), types)
    return onnx.FunctionProto.FromString(text) if text else None


def _nearest(versions: Sequence[int], version: int) -> int:
    return max((one for one in versions if one <= version), default=min(versions))


def splice(body: ir.Model, node: ir.Node, make: Builder) -> list[ir.Value]:
    """Move the nodes of a node's `body_model` to `make`; give the values that replace the node's outputs."""
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
        make.name_inside(one)
    return [next(results) if value.name else value for value in node.outputs]


def _described(value: ir.Value) -> onnx.ValueInfoProto:
    return ir.to_proto(ir.Value(name=value.name, type=value.type, shape=value.shape))
