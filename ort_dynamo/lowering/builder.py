"""The op builder lowerings write to: a graph builder with node dtypes and kernel dtypes settled at once.

Dtypes come from the schema alone, without onnx's shape inference (about 100 µs a node, a protobuf round trip):
lowerings take shapes from fake tensors, and ONNX Runtime infers the rest when the model is opened. Constants are folded
there, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ort_dynamo.errors import UnsupportedNodeError
from ort_dynamo.graph.marks import FOR_KERNEL, FX_NODE, READS_ROUNDED
from ort_dynamo.lowering.op_builder import GraphBuilder
from ort_dynamo.lowering.recipes.empty_expand import emptying
from ort_dynamo.lowering.recipes.int64_order import ordering
from ort_dynamo.lowering.recipes.integer_pad import padding
from ort_dynamo.targets.target import OPSET, Target

__all__ = ["LoweringBuilder", "MixedTypesError"]

_WIDER: dict[ir.DataType, tuple[ir.DataType, ...]] = {
    ir.DataType.FLOAT16: (ir.DataType.FLOAT,),
    ir.DataType.BFLOAT16: (ir.DataType.FLOAT,),
    ir.DataType.BOOL: (ir.DataType.UINT8, ir.DataType.INT32),
    ir.DataType.INT8: (ir.DataType.INT32, ir.DataType.INT64),
    ir.DataType.INT16: (ir.DataType.INT32, ir.DataType.INT64),
    ir.DataType.UINT8: (ir.DataType.INT32, ir.DataType.INT64),
    ir.DataType.INT32: (ir.DataType.INT64,),
    ir.DataType.INT64: (),
}
"""dtype -> dtypes that hold all its values, tried in order where a kernel lacks the dtype itself.

Integer arithmetic in a wider type, cast back, wraps around like the narrow type does.
"""


_WITHOUT_KERNEL = frozenset(
    # Folded, or typed by their sub-graphs, or for sequences of any tensors, which the kernels' records do not name.
    {"Constant", "If", "Loop", "Scan", "SequenceEmpty", "SequenceInsert", "ConcatFromSequence"}
)


@functools.cache
def _schema(op_type: str, domain: str, version: int | None) -> onnx.defs.OpSchema | None:
    if version is None:
        return None
    try:
        return onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


class MixedTypesError(AssertionError):
    """Inputs of one ONNX node that must have one dtype have two."""


class LoweringBuilder(GraphBuilder):
    """GraphBuilder that knows the target: an operator without a kernel for a dtype is computed in a wider one.

    Raises UnsupportedNodeError from a node's construction where no kernel fits, so that the ATen node at hand stays
    in eager. Inputs are positional, attributes keywords; Python scalars take the dtype of the tensor inputs that share
    their type variable.
    """

    def __init__(self, graph: ir.Graph, target: Target) -> None:
        super().__init__(graph)
        self.target = target
        self.origin = ""  # the FX node that the nodes being made come from
        self.reads_rounded = False  # whether these are to be marked READS_ROUNDED
        self._constants: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.Value] = {}
        self._lists: dict[tuple[tuple[int, ...], ir.DataType], ir.Value] = {}

    def constant(self, value: bool | int | float | Sequence[int] | npt.NDArray[Any], dtype: ir.DataType) -> ir.Value:
        """Return a constant, one per value and dtype in the whole graph: 0-d for a scalar, 1-D for a sequence.

        Raises:
            UnsupportedNodeError: `dtype` does not hold a scalar. torch's kernels differ: some wrap it around, some
                raise, and some compare it exactly.
        """
        if type(value) is list and set(map(type, value)) <= {int}:
            return self._integers(tuple(value), dtype)
        return self._array(value, dtype)

    def _integers(self, value: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        """Return a constant of a list, by the list: most are shapes, which models repeat."""
        if (value, dtype) not in self._lists:
            self._lists[value, dtype] = self._array(value, dtype)
        return self._lists[value, dtype]

    def _array(self, value: Any, dtype: ir.DataType) -> ir.Value:
        array = np.asarray(value, dtype=np.float64 if dtype.is_floating_point() else None)
        if not _fits(array, dtype):
            raise UnsupportedNodeError(f"the number {value} is out of the range of {dtype.name.lower()}")
        key = (dtype, array.shape, array.tobytes())  # bytes tell -0.0 from 0.0 and find nan equal to itself
        if key not in self._constants:
            name = f"const_{len(self._constants)}"
            tensor = ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)
            self._constants[key] = self.initializer(tensor, name)
        return self._constants[key]

    def promote(self, value: Any, dtype: ir.DataType | None) -> ir.Value:
        """Return a constant of Python scalars, or of a tensor or a text, as an operator of somebody else's may take."""
        if isinstance(value, (bool, int, float, list, tuple)):
            return self.constant(value, dtype or _default_dtype(value))
        return self.initializer(ir.tensor(value, dtype=dtype), f"given_{len(self.graph.initializers)}")

    def call_op(
        self,
        op_type: str,
        inputs: Sequence[Any],
        attributes: dict[str, Any],
        domain: str,
        version: int,
        outputs: int | Sequence[str | ir.Value],
        name: str | None,
    ) -> Any:
        """Add one node, with casts around it where the target's kernels need them."""
        if op_type == "Transpose" and list(perm := attributes.get("perm", ())) == list(range(len(perm))) != []:
            # Defect identity_transpose_before_gemm.
            op_type, attributes = "Identity", {}
        attributes = {key: _attribute(key, value) for key, value in attributes.items()}
        schema = _schema(op_type, domain, version)
        if schema is None and domain == "":
            raise AttributeError(f"ONNX has no operator {op_type} in opset {version}")
        inputs = self.cast_inputs(schema, inputs)
        if (instead := ordering(self.target, op_type, domain, inputs)) is not None:
            return instead(self.op, inputs)
        if (padded := padding(self.target, op_type, domain, inputs, attributes)) is not None:
            return padded(self.op, inputs)
        if (emptied := emptying(op_type, domain, inputs)) is not None:
            return emptied(self.op, inputs)
        bound = _bind(op_type, schema, inputs)
        substitute = self._substitutes(op_type, domain, bound)
        if not substitute:
            return self.add_node(op_type, inputs, attributes, domain, version, outputs, name)
        if schema is None:  # a contrib operator: which inputs share a type variable is not known here
            raise UnsupportedNodeError(f"{self.target.provider} has no {op_type} kernel for {bound}")
        inputs = [
            self._cast_for_kernel(value, substitute[variable])
            if value is not None and (variable := _variable(schema.inputs, index)) in substitute
            else value
            for index, value in enumerate(inputs)
        ]
        results = self.add_node(op_type, inputs, attributes, domain, version, outputs, name)
        if isinstance(results, ir.Value):
            return self._cast_back(schema, 0, results, bound, substitute)
        return tuple(self._cast_back(schema, index, value, bound, substitute) for index, value in enumerate(results))

    def _cast_back(
        self,
        schema: onnx.defs.OpSchema,
        index: int,
        value: ir.Value,
        bound: Mapping[str, ir.DataType],
        substitute: Mapping[str, ir.DataType],
    ) -> ir.Value:
        variable = _variable(schema.outputs, index)
        if variable not in substitute:
            return value
        return self._cast_for_kernel(value, bound[variable])

    def _cast_for_kernel(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        cast: ir.Value = self.add_node("Cast", [value], {"to": dtype}, "", OPSET, 1, None)
        node = cast.producer()
        assert node is not None
        node.metadata_props[FOR_KERNEL] = "1"
        return cast

    def _substitutes(self, op_type: str, domain: str, bound: Mapping[str, ir.DataType]) -> dict[str, ir.DataType]:
        """Type variable -> dtype to compute in, for the variables whose own dtype no kernel takes."""
        if op_type in _WITHOUT_KERNEL or self._takes(op_type, domain, bound):
            return {}
        schema = _schema(op_type, domain, OPSET)
        if schema is not None and _has_function(schema) and not self.target.has_op(op_type, domain):
            return {}  # ONNX Runtime inlines the operator's function body
        for variable, dtype in bound.items():
            for wider in _WIDER.get(dtype, ()):
                if self._takes(op_type, domain, {**bound, variable: wider}):
                    return {variable: wider}
        widest = {v: _WIDER[d][-1] for v, d in bound.items() if _WIDER.get(d)}
        if widest and self.target.takes(op_type, domain, {**bound, **widest}):
            return widest
        types = ", ".join(f"{variable}={dtype.name}" for variable, dtype in bound.items())
        raise UnsupportedNodeError(
            f"{self.target.provider} of {self.target.package} {self.target.version} has no {op_type} kernel for {types}"
        )

    def _takes(self, op_type: str, domain: str, bound: Mapping[str, ir.DataType]) -> bool:
        """Check whether the provider, or a fused kernel, computes an operator of these types."""
        return self.target.takes(op_type, domain, bound) or self.target.makes_kernel(op_type, domain, bound)

    def check_kernel(self, node: ir.Node) -> None:
        """Raise UnsupportedNodeError where the target cannot run a node that was made elsewhere as it stands."""
        schema = _schema(node.op_type, node.domain, OPSET)
        if self._substitutes(node.op_type, node.domain, _bind(node.op_type, schema, node.inputs)):
            raise UnsupportedNodeError(f"{self.target.provider} has no {node.op_type} kernel for the node's dtypes")

    def append(self, node: ir.Node) -> None:
        """Append a node, marked with where it comes from, with the dtypes of its outputs."""
        node.metadata_props[FX_NODE] = self.origin
        if self.reads_rounded:
            node.metadata_props[READS_ROUNDED] = "1"
        self.graph.append(node)
        self._infer_types(node)

    def _infer_types(self, node: ir.Node) -> None:
        """Set the dtypes of the node's outputs."""
        if (to := node.attributes.get("to")) is not None:
            types: Sequence[ir.DataType | None] = [ir.DataType(to.as_int())]
        elif node.op_type in ("Constant", "ConstantOfShape") and "value" in node.attributes:
            types = [node.attributes["value"].as_tensor().dtype]
        else:
            schema = _schema(node.op_type, node.domain, node.version)
            types = _output_types(schema, node)
        for output, dtype in zip(node.outputs, types, strict=False):
            if output.type is None and dtype is not None:
                output.type = ir.TensorType(dtype)


def _attribute(name: str, value: Any) -> Any:
    """Convert a list of integers to an attribute, since onnx_ir would find its type by slow checks; else no change."""
    return ir.AttrInt64s(name, value) if type(value) in (list, tuple) and set(map(type, value)) == {int} else value


def _fits(array: npt.NDArray[Any], dtype: ir.DataType) -> bool:
    """Check whether `dtype` holds this scalar. As in torch, unsigned integers hold negative scalars, too."""
    if not array.size or dtype == ir.DataType.BOOL:
        return True
    # Python compares integers with floats exactly, numpy does not.
    low, high = array.min().item(), array.max().item()
    if dtype.is_floating_point():
        return not any(math.isfinite(n) and abs(n) > float(dtype.max) for n in (low, high))
    lowest = -dtype.max if dtype.min == 0 and array.dtype.kind in "iu" else dtype.min
    return bool(lowest <= low and high <= dtype.max)


def _has_function(schema: Any) -> bool:  # onnx's stubs lack both properties
    return bool(schema.has_function or schema.has_context_dependent_function)


def _default_dtype(value: Any) -> ir.DataType:
    first = (value[0] if value else 0) if isinstance(value, (list, tuple)) else value
    if isinstance(first, bool):
        return ir.DataType.BOOL
    return ir.DataType.FLOAT if isinstance(first, float) else ir.DataType.INT64


def _output_types(schema: onnx.defs.OpSchema | None, node: ir.Node) -> Sequence[ir.DataType | None]:
    if schema is None:
        # Contrib operators: every output of those used here has the first input's dtype.
        first = next((value for value in node.inputs if value is not None), None)
        return [first.dtype if first is not None else None] * len(node.outputs)
    return _types_by(schema, _dtypes(node.inputs), len(node.outputs))


@functools.cache
def _types_by(
    schema: onnx.defs.OpSchema, inputs: tuple[ir.DataType | None, ...], outputs: int
) -> tuple[ir.DataType | None, ...]:
    bound = _bindings(schema, inputs)
    return tuple(_output_type(schema, _variable(schema.outputs, index), bound) for index in range(outputs))


def _dtypes(values: Sequence[ir.Value | None]) -> tuple[ir.DataType | None, ...]:
    return tuple(None if value is None else value.dtype for value in values)


def _output_type(schema: onnx.defs.OpSchema, variable: str, bound: Mapping[str, ir.DataType]) -> ir.DataType | None:
    """Return the dtype of an output: its own, its inputs', or the only one its variable may be (bool of Equal)."""
    if variable in bound:
        return bound[variable]
    allowed = [variable] if "(" in variable else _allowed(schema, variable)
    return ir.DataType[allowed[0][7:-1].upper()] if len(allowed) == 1 else None


def _allowed(schema: onnx.defs.OpSchema, variable: str) -> list[str]:
    (constraint,) = [c for c in schema.type_constraints if c.type_param_str == variable]
    return list(constraint.allowed_type_strs)


def _variable(formals: Sequence[Any], index: int) -> str:
    """Return the type variable of formal parameter `index`; the last one repeats when it is variadic."""
    return str(formals[min(index, len(formals) - 1)].type_str)


def _bind(
    op_type: str, schema: onnx.defs.OpSchema | None, inputs: Sequence[ir.Value | None]
) -> Mapping[str, ir.DataType]:
    """Type variable -> dtype, from the inputs. Raises MixedTypesError where two inputs disagree.

    onnx has no schema of a contrib operator: all inputs of those used here have one dtype, which is called T.
    """
    if schema is not None:
        return _bindings(schema, _dtypes(inputs))
    found = {dtype for dtype in _dtypes(inputs) if dtype is not None}
    if len(found) > 1:
        raise MixedTypesError(f"{op_type}: T is both " + " and ".join(sorted(dtype.name for dtype in found)))
    return {"T": found.pop()} if found else {}


@functools.cache
def _bindings(schema: onnx.defs.OpSchema, dtypes: tuple[ir.DataType | None, ...]) -> Mapping[str, ir.DataType]:
    bound: dict[str, ir.DataType] = {}
    for index, dtype in enumerate(dtypes):
        variable = "" if dtype is None else _variable(schema.inputs, index)
        if dtype is None or "(" in variable:
            continue
        other = bound.setdefault(variable, dtype)
        if other != dtype and (index < len(schema.inputs) - 1 or schema.inputs[-1].is_homogeneous):
            raise MixedTypesError(f"{schema.name}: {variable} is both {other.name} and {dtype.name}")
    return bound
