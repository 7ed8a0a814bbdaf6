"""Check a file before it is used: it has to be small enough, and valid."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import ModelProto, NodeProto, TypeProto

from ort_dynamo.errors import OnnxModelError
from ort_dynamo.graph.model_limits import check_limits, domain_of, subgraphs
from ort_dynamo.onnx_module.registry import MICROSOFT

__all__ = ["check_model", "read_opsets"]

OLDEST_OPSET, NEWEST_OPSET = 7, 23
_SMALL = 1024
"""Elements. The check reads the data of shapes only, never of weights."""

_BEFORE_ONNX = {"LayerNormalization": 17, "SimplifiedLayerNormalization": NEWEST_OPSET + 1}
"""Operators that ONNX Runtime writes into ONNX's own domain below the version that has them."""


def read_opsets(imports: Iterable[onnx.OperatorSetIdProto], what: str) -> dict[str, int]:
    """Return the version of each domain.

    Raises:
        OnnxModelError: a domain is there twice, or ONNX's own is of a version that is not supported.
    """
    found: dict[str, int] = {}
    for one in imports:
        domain = domain_of(one.domain)
        if domain in found and found[domain] != one.version:
            raise OnnxModelError(reason=f"{what} imports the domain {domain!r} in two versions")
        found[domain] = one.version
    if "" in found and not OLDEST_OPSET <= found[""] <= NEWEST_OPSET:
        raise OnnxModelError(
            reason=f"{what} is of opset {found['']}; supported are {OLDEST_OPSET} to {NEWEST_OPSET}. "
            "onnx.version_converter.convert_version may change it"
        )
    return found


def check_model(model: ModelProto) -> dict[str, TypeProto]:
    """Check sizes, depths and functions here, and the rest by onnx, whose errors are chained.

    Returns:
        The types of the outermost graph's values, as far as onnx finds them out.

    Raises:
        OnnxModelError: names the fault.
    """
    opsets = read_opsets(model.opset_import, "the model")
    if not model.graph.output:
        raise OnnxModelError(reason="it has no outputs")
    if model.graph.sparse_initializer:
        raise OnnxModelError(reason="sparse initializers are not supported")
    check_limits(model)
    for function in model.functions:
        read_opsets(function.opset_import, f"the function {function.name!r}")
    light = _without_weights(model, opsets.get("", 0))
    claimed = [one.type.tensor_type for one in light.graph.output if one.type.HasField("tensor_type")]
    for one in light.graph.input:
        if one.type.HasField("tensor_type") and not one.type.tensor_type.HasField("shape"):
            claimed.append(one.type.tensor_type)
    for kind in claimed:
        kind.shape.SetInParent()  # the checker wants one; whether it is right shows when the graph runs
    try:
        onnx.checker.check_model(light)
        for kind in claimed:
            kind.ClearField("shape")
        typed = onnx.shape_inference.infer_shapes(light, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise OnnxModelError(reason=f"it is not valid: {error}") from error
    except (RuntimeError, ValueError, TypeError, IndexError) as error:  # errors of C++ and protobuf that onnx passes on
        raise OnnxModelError(reason=f"it cannot be checked: {error}") from error
    return {one.name: one.type for one in (*typed.graph.input, *typed.graph.value_info)}


def _without_weights(model: ModelProto, opset: int) -> ModelProto:
    """Return a model of the same nodes and types that is light: large initializers are inputs."""
    light = ModelProto()
    for field, value in model.ListFields():
        if field.name in ("graph", "training_info", "metadata_props"):
            continue
        _copy(light, field.name, value)
    for field, value in model.graph.ListFields():
        if field.name not in ("initializer", "value_info", "quantization_annotation"):
            _copy(light.graph, field.name, value)
    inputs = {one.name for one in model.graph.input}
    for tensor in model.graph.initializer:
        count = 1
        for size in tensor.dims:
            count *= max(size, 0)
        if count <= _SMALL and tensor.data_location != onnx.TensorProto.EXTERNAL:
            light.graph.initializer.add().CopyFrom(tensor)
        elif tensor.name not in inputs:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    if _rename(light.graph.node, opset, 0) and not any(one.domain == MICROSOFT for one in light.opset_import):
        light.opset_import.add(domain=MICROSOFT, version=1)
    return light


def _copy(target: object, name: str, value: object) -> None:
    field = getattr(target, name)
    if hasattr(field, "CopyFrom"):
        field.CopyFrom(value)
    elif hasattr(field, "extend"):
        field.extend(value)
    else:
        setattr(target, name, value)


def _rename(nodes: Iterable[NodeProto], opset: int, depth: int) -> bool:
    """Give ONNX Runtime's operators their domain, for onnx not to stumble over them."""
    found = False
    for node in nodes:
        if domain_of(node.domain) == "" and opset < _BEFORE_ONNX.get(node.op_type, 0):
            node.domain = MICROSOFT
            found = True
        for graph in subgraphs(node):
            found = _rename(graph.node, opset, depth + 1) or found
    return found
