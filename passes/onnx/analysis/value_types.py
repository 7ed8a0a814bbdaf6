"""Infers types and shapes of values that a model does not state."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx.shape_inference import InferenceError, infer_shapes

from ort_dynamo.passes.onnx.analysis.subgraphs import subgraphs_of

__all__ = ["infer_missing_types"]

_log = logging.getLogger(__name__)

_LARGE = 1000
"""Bytes of an initializer above which inference gets only its type and shape."""

_LIKE_THEIR_FIRST_INPUT = frozenset({"BiasGelu", "FastGelu", "Gelu", "QuickGelu"})
"""com.microsoft operators, unknown to ONNX's inference, whose output has the first input's type and shape."""


def infer_missing_types(model: ir.Model, *, shapes: bool = False) -> None:
    """Give types and shapes to values without a type; inputs and outputs of graphs keep theirs.

    A model whose values all have types does not change. Values that inference cannot type stay untyped.

    Args:
        model: the model.
        shapes: also give shapes to values that have a type but no shape.
    """
    if not _is_lacking(model, shapes):
        return
    graphs = [model.graph, *model.graph.subgraphs()]
    stated = [(value, value.type, value.shape) for graph in graphs for value in [*graph.inputs, *graph.outputs]]
    _infer(model, follow_data=not shapes)
    while _infer_contrib_nodes(model):
        _infer(model, follow_data=not shapes)
    for value, type_, shape in stated:
        if type_ is not None:
            value.type, value.shape = type_, shape


def _is_lacking(model: ir.Model, shapes: bool) -> bool:
    values = [value for node in model.graph.all_nodes() for value in node.outputs if value.name]
    return any(value.type is None or (shapes and value.shape is None) for value in values)


def _infer_contrib_nodes(model: ir.Model) -> bool:
    """Type the results of the operators above for typed inputs; False where there is nothing to do."""
    changed = False
    for node in model.graph.all_nodes():
        if node.domain != "com.microsoft" or node.op_type not in _LIKE_THEIR_FIRST_INPUT:
            continue
        source, (result, *_) = node.inputs[0], node.outputs
        if source is None or source.type is None:
            continue
        if result.type is None or (result.shape is None and source.shape is not None):
            result.type, result.shape, changed = ir.TensorType(source.dtype or ir.DataType.FLOAT), source.shape, True
    return changed


def _infer(model: ir.Model, *, follow_data: bool) -> None:
    """Give values the types and shapes that ONNX infers; a model that it cannot read does not change.

    onnx_ir's ShapeInferencePass does not tell a sequence of tensors, or an optional tensor, from a tensor.

    Args:
        model: the model.
        follow_data: also follow the elements of shapes; for a value of 50 MB that takes 4 s.
    """
    try:
        inferred = infer_shapes(_proto(model), check_type=False, strict_mode=False, data_prop=follow_data)
    except (InferenceError, DecodeError, ValueError, RuntimeError, IndexError) as error:
        _log.warning("ONNX cannot infer the types of a model: %s", error)
        return
    for graph, proto in _graphs(model.graph, inferred.graph):
        known = {info.name: info for info in (*proto.input, *proto.value_info, *proto.output)}
        for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
            if value.name and (info := known.get(value.name)) is not None:
                _take_over(value, info.type)


def _take_over(value: ir.Value, proto: onnx.TypeProto) -> None:
    """Give a value the type and shape of a proto."""
    if not _is_stated(proto):
        return
    value.type = ir.serde.deserialize_type_proto_for_type(proto)
    if (shape := ir.serde.deserialize_type_proto_for_shape(proto)) is not None:
        value.shape = shape


def _is_stated(proto: onnx.TypeProto) -> bool:
    """Check whether a proto states a type that onnx_ir has: it has none of maps."""
    match kind := proto.WhichOneof("value"):
        case "tensor_type" | "sparse_tensor_type":
            return bool(getattr(proto, kind).HasField("elem_type"))
        case "sequence_type" | "optional_type":
            return _is_stated(getattr(proto, kind).elem_type)
    return False


def _graphs(graph: ir.Graph, proto: onnx.GraphProto) -> Iterator[tuple[ir.Graph, onnx.GraphProto]]:
    """Yield a graph and its subgraphs, each with its proto."""
    yield graph, proto
    for node, node_proto in zip(graph, proto.node, strict=True):
        inner = [graph for one in node_proto.attribute for graph in ([one.g] if one.HasField("g") else one.graphs)]
        for pair in zip(subgraphs_of(node), inner, strict=True):
            yield from _graphs(*pair)


def _proto(model: ir.Model) -> onnx.ModelProto:
    """Return the proto of a model in which large initializers, and those without data, are inputs."""
    given = model.graph.initializers.values()
    large = [value for value in given if value.const_value is None or value.const_value.nbytes > _LARGE]
    tensors = [value.const_value for value in large]
    for value, tensor in zip(large, tensors, strict=True):
        if tensor is not None:
            value.type, value.shape = (
                value.type or ir.TensorType(tensor.dtype),
                value.shape or ir.Shape(tensor.shape.numpy()),
            )
        value.const_value = ir.tensor([0])
    try:
        proto = ir.to_proto(model)
    finally:
        for value, tensor in zip(large, tensors, strict=True):
            value.const_value = tensor
    names = {value.name for value in large}
    small = [tensor for tensor in proto.graph.initializer if tensor.name not in names]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(small)
    proto.graph.input.extend(ir.to_proto(value) for value in large if not value.is_graph_input())
    return proto
