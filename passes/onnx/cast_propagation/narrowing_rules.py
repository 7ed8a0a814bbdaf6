"""Rules for operators that may compute in a narrower float dtype, and for their operands that change with them."""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection
from typing import NamedTuple

import onnx
import onnx_ir as ir

from ort_dynamo.targets.target import Target

__all__ = [
    "COMPUTES_WIDE",
    "EXACT",
    "LEVEL_2",
    "NORMALIZATIONS",
    "Operands",
    "Proof",
    "allowed_operators",
    "known_operators",
    "operands",
]

EXACT = frozenset({
    "Abs", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Neg",
    "Pad", "Relu", "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
    "Where",
})  # fmt: skip
"""Level 1: each element of a result is an element of an operand, its negative, its magnitude or zero.

Rounding commutes with all of them, so a cast before one gives the same result as a cast after it.
"""

COMPUTES_WIDE = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "Softmax", "Tanh"})
"""At every level, but only between casts: their kernels for narrow types widen, compute and round once, as those do.

A cast on one side alone does not move over them below level 2: a result would be rounded that was not.
"""

LEVEL_2 = frozenset({"Add", "BiasGelu", "Dropout", "FastGelu", "Gelu", "LayerNormalization", "Tanh"})

NORMALIZATIONS = frozenset({
    "LayerNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
})  # fmt: skip
"""Operators that allow_layer_norm_mod_precision allows, at every level."""

_NARROW_OUTPUTS = {
    "SimplifiedLayerNormalization": (0,),
    "SkipLayerNormalization": (0, 3),
    "SkipSimplifiedLayerNormalization": (0, 3),
}
"""ONNX Runtime's own operators with float32 outputs beside the narrow ones: their statistics."""


class Proof(enum.Enum):
    """The proof about a node's neighbours that is needed to narrow it.

    GIVEN: all its float32 inputs were widened from the narrow dtype, with only nodes in between that could be narrow.
    WANTED: all its float32 outputs are rounded to the narrow dtype anyway, with only such nodes in between.
    """

    NOTHING = enum.auto()
    GIVEN_OR_WANTED = enum.auto()
    GIVEN_AND_WANTED = enum.auto()

    @property
    def passes_on(self) -> bool:
        """True if a fact about one side of such a node holds on the other side as well."""
        return self is not Proof.GIVEN_AND_WANTED


class Operands(NamedTuple):
    """Positions of the operands that share the type that a node computes in, all float32 now."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def allowed_operators(level: int, allow: Collection[str], layer_norm: bool) -> frozenset[str]:
    """Return the operator types that may become narrow at a level of 0, 1 or 2, beside those of COMPUTES_WIDE."""
    levels: tuple[frozenset[str], ...] = (frozenset(), EXACT, EXACT | LEVEL_2)
    return levels[level] | frozenset(allow) | (NORMALIZATIONS if layer_norm else frozenset())


def known_operators(target: Target) -> frozenset[str]:
    """Return the operator types that ONNX defines, and those that the target has kernels for."""
    return _defined_operators() | {op_type for _, op_type in target.kernels}


@functools.cache
def _defined_operators() -> frozenset[str]:
    return frozenset(schema.name for schema in onnx.defs.get_all_schemas())


def operands(node: ir.Node, dtype: ir.DataType, version: int | None, target: Target | None) -> Operands | None:
    """Return the operands of a float32 node that would become `dtype`; None where the node must stay.

    Args:
        node: any node.
        dtype: the narrow type.
        version: the model's opset version of the node's domain.
        target: if given, one of its kernels must take `dtype`; otherwise the operator's schema decides alone.
    """
    if node.op_type == "Cast" or any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
        return None
    schema = _schema(node.op_type, version, node.domain) if version is not None else None
    bound: tuple[Operands, tuple[str, ...]] | None
    if schema is None:
        bound = _by_dtype(node)
    else:
        bound = _by_variable(node, schema, f"tensor({dtype.name.lower()})")
    if bound is None or not bound[0].inputs or not bound[0].outputs:
        return None
    found, variables = bound
    values = [*(node.inputs[i] for i in found.inputs), *(node.outputs[i] for i in found.outputs)]
    if any(value is None or value.type != ir.TensorType(ir.DataType.FLOAT) for value in values):
        return None
    if target is not None and not target.takes(node.op_type, node.domain, dict.fromkeys(variables, dtype)):
        return None
    return found


_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@functools.cache
def _schema(op_type: str, version: int, domain: str) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def _by_dtype(node: ir.Node) -> tuple[Operands, tuple[str, ...]]:
    """Operators that ONNX does not define: all float32 operands are of one type, with the exceptions above."""
    inputs = tuple(i for i, value in enumerate(node.inputs) if value is not None and value.dtype == ir.DataType.FLOAT)
    outputs = tuple(i for i, value in enumerate(node.outputs) if value.dtype == ir.DataType.FLOAT)
    only = _NARROW_OUTPUTS.get(node.op_type, outputs)
    return Operands(inputs, tuple(i for i in outputs if i in only)), ("T", "V")


def _by_variable(node: ir.Node, schema: onnx.defs.OpSchema, narrow: str) -> tuple[Operands, tuple[str, ...]] | None:
    """Return the operands of the type variable of the first float32 input."""
    ins = [_formal(schema.inputs, i) for i in range(len(node.inputs))]
    outs = [_formal(schema.outputs, i) for i in range(len(node.outputs))]
    floats = [v for v, x in zip(ins, node.inputs, strict=True) if x is not None and x.dtype == ir.DataType.FLOAT]
    constraints = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    if not floats or narrow not in constraints.get(floats[0], ()):
        return None
    variable = floats[0]
    inputs = tuple(i for i, name in enumerate(ins) if name == variable and node.inputs[i] is not None)
    used = tuple(i for i, name in enumerate(outs) if name == variable and node.outputs[i].name)
    return Operands(inputs, used), (variable,)


def _formal(formals: object, index: int) -> str:
    """Return the type variable of a formal parameter; a variadic last one repeats."""
    parameters = list(formals)  # type: ignore[call-overload]
    return str(parameters[min(index, len(parameters) - 1)].type_str)
