"""Makes the nodes that a pass adds to a model, and states their types and shapes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.new_values import NewValues
from ort_dynamo.targets.target import OPSET

__all__ = ["NewNodes"]

_Dims = Sequence[int | ir.SymbolicDim]


class NewNodes:
    """Nodes of ONNX's own operators that compute values of one type, and that are in no graph yet.

    Args:
        new: names and constants of the pass.
        like: the value whose type they have, and whose name theirs begin with.

    Attributes:
        tape: the nodes, in order.
    """

    def __init__(self, new: NewValues, like: ir.Value) -> None:
        self._new = new
        self._like = like
        self.tape = ir.tape.Tape()

    def add(
        self, operator: str, inputs: Sequence[ir.Value], dims: _Dims, **attributes: int | Sequence[int]
    ) -> ir.Value:
        """Return the result, of the shape `dims`, of a new node."""
        value = self.tape.op(operator, inputs, attributes, version=OPSET)
        value.name = self._new.name(f"{self._like.name}_{operator.lower()}")
        value.type, value.shape = self._like.type, ir.Shape(dims)
        return value

    def reshape(self, value: ir.Value, shape: Sequence[int], dims: _Dims) -> ir.Value:
        """Return a value of the shape `dims`, for which a Reshape needs `shape`; itself if it has it."""
        if value.shape is not None and tuple(value.shape) == tuple(dims):
            return value
        return self.add("Reshape", [value, self._new.shape(shape)], dims)

    def expand(self, value: ir.Value, shape: Sequence[int], dims: _Dims) -> ir.Value:
        """Return a value expanded to the shape `dims`, for which an Expand needs `shape`."""
        return self.add("Expand", [value, self._new.shape(shape)], dims)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Return a value, whose shape is known, with its dimensions in another order."""
        assert value.shape is not None
        return self.add("Transpose", [value], [value.shape[axis] for axis in perm], perm=perm)
