"""A single operator between casts that only its kernel needed stays in float16 or bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from ort_dynamo.graph.marks import FOR_KERNEL, PASS
from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.passes.onnx.analysis.replacing import replace_outputs
from ort_dynamo.passes.ordering import Condition, ordering
from ort_dynamo.targets.target import Target

__all__ = ["ComputeInHalf"]

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

_ROUNDED_ONCE = frozenset({"Abs", "Add", "Max", "Min", "Mul", "Neg", "Relu", "Sub", "Where"})
"""Operators whose half-width result equals the float32 result, rounded.

float32 holds every product of two half-width values exactly, and rounding a sum to float32 first changes nothing
(Figueroa, 1995).
"""


@ordering(needs=[Condition.CASTS_OF_EACH])
@dataclass(frozen=True)
class ComputeInHalf(ir.passes.InPlacePass):
    """Rewrite Cast(half -> float32), one operator, Cast(float32 -> half) as the operator in half width.

    Lowerings compute half-width arithmetic in float32, which formulas of several operators need. For a single operator
    the result is the same. On targets where each node is a launch and a pass over memory, the casts cost time.

    The conditions: every float input is such a cast, or a constant that half width holds; nothing else reads the
    result; the target has a kernel. A first input that is a condition is not cast. With bfloat16 and excess precision,
    the pass skips an operator next to another one between casts. There remove_round_trips removes the casts between the
    two, and an operator in half width would need them again.

    Attributes:
        target: the target whose kernels count.
        excess_precision: whether roundings to bfloat16 between operators are removed.
    """

    target: Target
    excess_precision: bool = True

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite every graph of the model."""
        new, modified = NewValues(model, self), False
        for node in list(RecursiveGraphIterator(model.graph)):
            modified |= self._keep(node, new)
        return ir.passes.PassResult(model, modified)

    def _keep(self, narrowing: ir.Node, new: NewValues) -> bool:
        if not _is_for_kernel(narrowing) or narrowing.outputs[0].dtype not in _HALF:
            return False
        (result,), (half,) = narrowing.inputs, narrowing.outputs
        node = None if result is None else result.producer()
        if result is None or node is None or node.domain or node.op_type not in _ROUNDED_ONCE:
            return False
        if node.graph is not narrowing.graph or len(result.uses()) != 1 or result.is_graph_output():
            return False
        assert half.dtype is not None
        narrow = [_in_half(value, half.dtype) for value in node.inputs]
        if any(value is None for value in narrow) or not any(isinstance(value, ir.Value) for value in narrow[-2:]):
            return False
        if not self.target.takes(node.op_type, "", {"T": half.dtype}):
            return False
        if self.excess_precision and half.dtype == ir.DataType.BFLOAT16 and _has_neighbour(narrow, half):
            return False
        for index, value in enumerate(narrow):
            if isinstance(value, ir.Value):
                node.replace_input_with(index, value)
            else:
                assert isinstance(value, np.ndarray)
                assert isinstance(node.graph, ir.Graph)
                node.replace_input_with(index, new.constant("half_constant", value, node.graph))
        _take_place(node, narrowing)
        node.metadata_props[PASS] = repr(self)
        return True


def _is_for_kernel(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Cast" and not node.domain and FOR_KERNEL in node.metadata_props


def _in_half(value: ir.Value | None, dtype: ir.DataType) -> ir.Value | np.ndarray | None:
    """Find a float32 input in `dtype`: the value that was widened, or a constant; None if there is neither."""
    if value is None or value.dtype == ir.DataType.BOOL:
        return value
    node = value.producer()
    if node is not None:
        return node.inputs[0] if _is_for_kernel(node) and node.inputs[0].dtype == dtype else None  # type: ignore[union-attr]
    if value.is_graph_input() or value.const_value is None or value.dtype != ir.DataType.FLOAT:
        return None
    wide = value.const_value.numpy()
    narrow = wide.astype(dtype.numpy())
    return narrow if np.array_equal(narrow.astype(wide.dtype), wide, equal_nan=True) else None


def _has_neighbour(inputs: Sequence[ir.Value | np.ndarray | None], output: ir.Value) -> bool:
    """Check whether an input was rounded from a wider value, or a reader of the output computes in a wider type."""
    return any(_is_rounded(value) for value in inputs if isinstance(value, ir.Value)) or _is_widened(output)


def _is_rounded(value: ir.Value) -> bool:
    node = value.producer()
    while node is not None and node.op_type in _MOVES and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return _is_for_kernel(node)


def _is_widened(value: ir.Value) -> bool:
    return any(
        _is_for_kernel(reader) or (reader.op_type in _MOVES and any(map(_is_widened, reader.outputs)))
        for reader in value.consumers()
    )


_MOVES = frozenset({"Expand", "Flatten", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def _take_place(node: ir.Node, narrowing: ir.Node) -> None:
    """Replace the output of the cast after `node` by that of `node`; a graph output keeps its name."""
    (result,), (half,), graph = node.outputs, narrowing.outputs, narrowing.graph
    assert isinstance(graph, ir.Graph)
    result.type = half.type
    returned = replace_outputs(graph, half, result)
    ir.convenience.replace_all_uses_with(half, result)
    graph.remove(narrowing, safe=True)
    if returned:
        result.name = half.name
