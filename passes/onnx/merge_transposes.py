"""Replace Transposes that undo each other, with a Reshape between them, by one Reshape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.passes.onnx.analysis.opsets import is_older
from ort_dynamo.passes.onnx.analysis.refusals import refuse
from ort_dynamo.passes.onnx.analysis.replacing import replace_node
from ort_dynamo.passes.onnx.analysis.shapes import RESHAPES, is_same_size
from ort_dynamo.passes.onnx.analysis.value_types import infer_missing_types
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.target import OPSET

__all__ = ["MergeTransposes"]

_OPSET = 13
"""The first opset in which the axes of Squeeze and Unsqueeze are an input."""

Dims = Sequence[int | ir.SymbolicDim]


@ordering(ends=[Condition.NO_DEAD_NODES])
@dataclass(frozen=True)
class MergeTransposes(ir.passes.InPlacePass):
    """Rewrite Transpose(Reshape(Transpose(x))) as Reshape(x) if it has the elements of x in the order of x.

    A convolution in channels_last between transformer layers has such nodes: `x.flatten(2).transpose(1, 2)` turns
    (rows, channels, height, width) into (rows, height * width, channels), which is the order of its memory. Each
    Transpose copies the tensor.

    The conditions are:

    1. between the two Transposes are only operators that change a shape;
    2. all sizes are known, but for equal first sizes: of dimensions that change, the pass has to know the factors;
    3. no size is 0.

    A model of opset 12 or older does not change.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every match in the main graph."""
        transposes = [node for node in model.graph if _is_transpose(node)]
        if is_older(model, _OPSET) or not any(map(_first_of, transposes)):
            return ir.passes.PassResult(model, False)
        infer_missing_types(model, shapes=True)
        new, modified = NewValues(model, self), False
        for node in transposes:
            first = _first_of(node)
            if first is None:
                continue
            shape = _shape_of_same(first, node)
            if shape is None:
                refuse(self, node, "its elements are not known to be in the order before the other Transpose")
                continue
            tape = ir.tape.Tape()
            result = tape.op("Reshape", [first.inputs[0], new.shape(shape)], version=OPSET)
            replace_node(node, tape, result, self)
            modified = True
        return ir.passes.PassResult(model, modified)


def _is_transpose(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and not node.domain and "perm" in node.attributes


def _first_of(second: ir.Node) -> ir.Node | None:
    """Return the Transpose whose result a Transpose reads through operators that change its shape; else None."""
    value = second.inputs[0]
    while value is not None and (node := value.producer()) is not None and node.graph is second.graph:
        if _is_transpose(node):
            return node
        if node.op_type not in RESHAPES or node.domain:
            return None
        value = node.inputs[0]
    return None


def _shape_of_same(first: ir.Node, second: ir.Node) -> list[int] | None:
    """Return the shape, as Reshape takes it, of the second result if it has the first's input's order; else None."""
    shapes = [value.shape for value in (first.outputs[0], second.inputs[0], second.outputs[0]) if value is not None]
    turned, reshaped, after = (None if shape is None else tuple(shape) for shape in shapes)
    if turned is None or reshaped is None or after is None:
        return None
    factors = _common_factors(turned, reshaped)
    if factors is None:
        return None
    of_turned, of_reshaped = factors
    perm = list(first.attributes.get_ints("perm", ()))
    in_memory = [factor for axis in range(len(turned)) for factor in of_turned[perm.index(axis)]]
    found = [factor for axis in second.attributes.get_ints("perm", ()) for factor in of_reshaped[axis]]
    if in_memory != found:
        return None
    shape = [size if isinstance(size, int) else -1 for size in after]
    return shape if shape.count(-1) < 2 else None


def _common_factors(first: Dims, second: Dims) -> tuple[list[list[int]], list[list[int]]] | None:
    """Split the dimensions of two shapes of one tensor into common factors, and number them in order.

    Returns:
        For each dimension of both shapes the numbers of its factors, none for a size of 1. None if there are no common
        factors, or a size is not known.
    """
    sides: tuple[list[list[int]], list[list[int]]] = ([[] for _ in first], [[] for _ in second])
    left = [list(_sized(first)), list(_sized(second))]
    number = 0
    while left[0] and left[1]:
        (axis, size), (other_axis, other) = left[0].pop(0), left[1].pop(0)
        if not isinstance(size, int) or not isinstance(other, int):
            if not is_same_size(size, other):
                return None
            size = other = 1
        common = min(size, other)
        if not common or size % common or other % common:
            return None
        sides[0][axis].append(number)
        sides[1][other_axis].append(number)
        number += 1
        if size > common:
            left[0].insert(0, (axis, size // common))
        if other > common:
            left[1].insert(0, (other_axis, other // common))
    return None if left[0] or left[1] else sides


def _sized(shape: Dims) -> Iterator[tuple[int, int | ir.SymbolicDim]]:
    """Yield the dimensions of other sizes than 1."""
    return ((axis, size) for axis, size in enumerate(shape) if size != 1)
