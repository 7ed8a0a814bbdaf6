"""The general rule: a schema defines its operator, so a node that fits an older schema may be moved to it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.constants import constant_of
from ort_dynamo.passes.onnx.opsets.building import InexpressibleError

__all__ = ["check_fits", "fitted", "schema_at"]

Schema = onnx.defs.OpSchema

_NEW_VALUES: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("Pad", "mode"): {"wrap": 19},
    ("Resize", "coordinate_transformation_mode"): {"half_pixel_symmetric": 19},
    ("ScatterElements", "reduction"): {"max": 18, "min": 18},
    ("ScatterND", "reduction"): {"max": 18, "min": 18},
}
"""(operator, attribute) -> value that older schemas with the attribute lack -> the opset that added it."""

_OLD_VALUES: Mapping[tuple[str, str], str] = {("RoiAlign", "coordinate_transformation_mode"): "output_half_pixel"}
"""(operator, attribute) -> the value that says what the operator did before it had the attribute."""


@functools.cache
def schema_at(op_type: str, version: int) -> Schema | None:
    """Return the schema of an operator of ai.onnx in an opset; None where it has no such operator."""
    try:
        found = onnx.defs.get_schema(op_type, version, "")
    except onnx.defs.SchemaError:
        return None
    return None if found.deprecated else found


def fitted(
    node: ir.Node, new: Schema, old: Schema, version: int
) -> tuple[Sequence[ir.Value | None], dict[str, ir.Attr]]:
    """Fit a node of schema `new` to schema `old`.

    A constant input that is an attribute in `old` becomes that attribute. An attribute that `old` lacks is dropped if
    it has the old behaviour. Changed defaults are written out.

    Args:
        node: the node.
        new: its schema.
        old: the schema of opset `version`, which is older.
        version: the older opset.

    Returns:
        Inputs and attributes of the node under `old`.

    Raises:
        InexpressibleError: the node does not fit.
    """
    inputs = list(node.inputs)
    while inputs and inputs[-1] is None:
        inputs.pop()
    attributes = _attributes(node, new, old, version)
    while len(inputs) > old.max_input:
        _to_attribute(inputs.pop(), new.inputs[len(inputs)].name, old, attributes)
    for index, value in enumerate(inputs):
        if value is None and _parameter(old.inputs, index).option == Schema.FormalParameterOption.Single:
            raise InexpressibleError(f"its input {old.inputs[index].name} may be left out only after opset {version}")
    if len(inputs) < old.min_input:
        raise InexpressibleError(f"its input {old.inputs[len(inputs)].name} may be left out only after opset {version}")
    if len(node.outputs) > old.max_output:
        raise InexpressibleError(f"it has more outputs than in opset {version}")
    _check_types(inputs, node.outputs, new, old, version)
    for name, known in old.attributes.items():
        if known.required and name not in attributes:
            raise InexpressibleError(f"its attribute {name} may be left out only after opset {version}")
    return inputs, attributes


def check_fits(node: ir.Node, opset: int, version: int) -> None:
    """Raise InexpressibleError if opset `version` lacks the types of a node that was made for it.

    Args:
        node: the node; unknown types are those of a model of opset `opset`.
        opset: the newer opset.
        version: the older opset.
    """
    new, old = schema_at(node.op_type, opset), schema_at(node.op_type, version)
    assert new is not None
    assert old is not None
    _check_types(node.inputs, node.outputs, new, old, version)


def _check_types(
    inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value], new: Schema, old: Schema, version: int
) -> None:
    for values, theirs, mine in ((inputs, old.inputs, new.inputs), (outputs, old.outputs, new.outputs)):
        for index, value in enumerate(values):
            _check_type(value, _parameter(theirs, index), old, _parameter(mine, index), new, version)


def _attributes(node: ir.Node, new: Schema, old: Schema, version: int) -> dict[str, ir.Attr]:
    kept = {}
    for name, attribute in node.attributes.items():
        if name in old.attributes:
            since = _NEW_VALUES.get((node.op_type, name), {}).get(str(attribute.value), 0)
            if since > version:
                raise InexpressibleError(f"its {name} {attribute.value!r} is of opset {since}")
            kept[name] = attribute
        elif not _says_nothing(node.op_type, name, attribute, new):
            raise InexpressibleError(f"opset {version} does not know its attribute {name}={attribute.value!r}")
    for name, known in new.attributes.items():
        default = known.default_value
        if name not in kept and name in old.attributes and default.name and not _same_default(old, name, default):
            kept[name] = ir.serde.deserialize_attribute(default)
    return kept


def _same_default(schema: Schema, name: str, default: onnx.AttributeProto) -> bool:
    mine = schema.attributes[name].default_value
    return (
        bool(onnx.helper.get_attribute_value(mine) == onnx.helper.get_attribute_value(default)) if mine.name else False
    )


def _says_nothing(op_type: str, name: str, attribute: ir.Attr, schema: Schema) -> bool:
    """Check whether an attribute has its default value, or that of the older behaviour."""
    if _OLD_VALUES.get((op_type, name)) == attribute.value:
        return True
    if name == "dilations":  # its default, which depends on the rank, is in no schema
        return all(number == 1 for number in attribute.as_ints())
    default = schema.attributes[name].default_value if name in schema.attributes else None
    return (
        default is not None and bool(default.name) and ir.serde.deserialize_attribute(default).value == attribute.value
    )


def _to_attribute(value: ir.Value | None, name: str, old: Schema, attributes: dict[str, ir.Attr]) -> None:
    if value is None:
        return
    known = old.attributes.get(name)
    if known is None or known.type != Schema.AttrType.INTS:
        raise InexpressibleError(f"its input {name} is of a newer opset")
    numbers = constant_of(value)
    if numbers is None:
        raise InexpressibleError(f"its input {name} was an attribute, and is not constant")
    if not numbers:
        raise InexpressibleError(f"its input {name} is empty")
    attributes[name] = ir.AttrInt64s(name, numbers)


def _parameter(parameters: Sequence[Schema.FormalParameter], index: int) -> Schema.FormalParameter:
    """Return the formal parameter at an index; the last one repeats."""
    return parameters[min(index, len(parameters) - 1)]


def _check_type(
    value: ir.Value | None,
    parameter: Schema.FormalParameter,
    schema: Schema,
    now: Schema.FormalParameter,
    new: Schema,
    version: int,
) -> None:
    if value is None or not value.name:
        return
    allowed = _types(parameter, schema)
    if value.type is None:
        if not _types(now, new) <= allowed:
            raise InexpressibleError(f"the type of {value.name} is not known, and opset {version} does not take all")
    elif (name := _type_name(value.type)) not in allowed:
        raise InexpressibleError(f"opset {version} has no {name} for {parameter.name}")


def _types(parameter: Schema.FormalParameter, schema: Schema) -> frozenset[str]:
    for constraint in schema.type_constraints:
        if constraint.type_param_str == parameter.type_str:
            return frozenset(constraint.allowed_type_strs)
    return frozenset({parameter.type_str})


def _type_name(type_: ir.TypeProtocol) -> str:
    """Return a type as schemas spell it, e.g. seq(tensor(float))."""
    if isinstance(type_, ir.SequenceType):
        return f"seq({_type_name(type_.elem_type)})"
    if isinstance(type_, ir.OptionalType):
        return f"optional({_type_name(type_.elem_type)})"
    kind = "sparse_tensor" if isinstance(type_, ir.SparseTensorType) else "tensor"
    return f"{kind}({type_.dtype.name.lower()})"
