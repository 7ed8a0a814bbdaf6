"""The attributes of a node as Python's values, of the types that its operator names."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any

import onnx
import torch
from onnx import AttributeProto

from ort_dynamo.errors import OnnxModelError
from ort_dynamo.onnx_module.host_values import Host
from ort_dynamo.onnx_module.tensor_data import element_type, read_tensor

__all__ = ["bind_attributes", "own_attributes"]

_KINDS: dict[Any, int] = {
    int: AttributeProto.INT,
    float: AttributeProto.FLOAT,
    str: AttributeProto.STRING,
    list[int]: AttributeProto.INTS,
    list[float]: AttributeProto.FLOATS,
    list[str]: AttributeProto.STRINGS,
    torch.dtype: AttributeProto.INT,
    Host: AttributeProto.TENSOR,
}


def own_attributes(node: onnx.NodeProto, outside: Mapping[str, AttributeProto] | None) -> dict[str, AttributeProto]:
    """Give a node's attributes by name; one that refers to a function's has its value, if there is one.

    Args:
        node: the node.
        outside: the attributes of the function; None outside of functions.
    """
    found: dict[str, AttributeProto] = {}
    for attribute in node.attribute:
        if attribute.name in found:
            raise OnnxModelError(reason=f"the attribute {attribute.name!r} occurs twice")
        if not attribute.ref_attr_name:
            found[attribute.name] = attribute
        elif outside is None:
            raise OnnxModelError(
                reason=f"the attribute {attribute.name!r} refers to a function's, but the node is in none"
            )
        elif attribute.ref_attr_name in outside:
            found[attribute.name] = AttributeProto()
            found[attribute.name].CopyFrom(outside[attribute.ref_attr_name])
            found[attribute.name].name = attribute.name
    return found


def bind_attributes(
    attributes: Mapping[str, AttributeProto],
    types: Mapping[str, Any],
    needed: frozenset[str],
    refuse: Callable[[str], OnnxModelError],
) -> dict[str, Any]:
    """Return the keyword arguments of an operator.

    Args:
        attributes: the attributes, by name.
        types: the attributes of the operator, with their types.
        needed: the required attributes.
        refuse: makes an error from a reason.
    """
    unknown = sorted(attributes.keys() - types.keys())
    if unknown:
        raise refuse(f"the attribute {unknown[0]!r} is not supported")
    missing = sorted(needed - attributes.keys())
    if missing:
        raise refuse(f"the attribute {missing[0]!r} is missing")
    return {name: _value(attribute, types[name], refuse) for name, attribute in attributes.items()}


def _value(attribute: AttributeProto, kind: Any, refuse: Callable[[str], OnnxModelError]) -> Any:
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    wanted = _KINDS[type(choices[0]) if choices else kind]
    if attribute.type != wanted:
        names = {value: name for name, value in AttributeProto.AttributeType.items()}
        raise refuse(
            f"the attribute {attribute.name!r} has the type {names.get(attribute.type, attribute.type)}; "
            f"expected {names[wanted]}"
        )
    value: Any = onnx.helper.get_attribute_value(attribute)
    if wanted == AttributeProto.TENSOR:
        return _number(attribute, refuse)
    if wanted == AttributeProto.STRING:
        value = _text(value, attribute.name, refuse)
    elif wanted == AttributeProto.STRINGS:
        return [_text(one, attribute.name, refuse) for one in value]
    elif wanted in (AttributeProto.INTS, AttributeProto.FLOATS):
        return list(value)
    if choices and value not in choices:
        raise refuse(f"the attribute {attribute.name!r} is {value!r}; supported are {', '.join(map(repr, choices))}")
    return element_type(value, f"the attribute {attribute.name!r}") if kind is torch.dtype else value


def _text(value: bytes, name: str, refuse: Callable[[str], OnnxModelError]) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise refuse(f"the attribute {name!r} is not text: {error}") from error


def _number(attribute: AttributeProto, refuse: Callable[[str], OnnxModelError]) -> Host:
    tensor = read_tensor(attribute.t)
    if tensor.numel() != 1:
        raise refuse(f"the attribute {attribute.name!r} has {tensor.numel()} elements; expected 1")
    return Host((tensor.item(),), True, tensor.dtype)
