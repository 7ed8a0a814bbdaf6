"""Compares shapes of an ONNX model's values, and looks behind nodes that change a shape alone."""

from __future__ import annotations

from collections.abc import Sequence, Set

import onnx_ir as ir

__all__ = ["RESHAPES", "are_same_sizes", "behind", "is_same_size"]

RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that change the shape of their first input, and no element."""


def behind(value: ir.Value, operators: Set[str]) -> ir.Value:
    """Return the value that another one is a view of, through nodes of these operators of ONNX."""
    while (node := value.producer()) is not None and node.op_type in operators and not node.domain:
        if node.inputs[0] is None:
            break
        value = node.inputs[0]
    return value


def are_same_sizes(first: Sequence[int | ir.SymbolicDim], second: Sequence[int | ir.SymbolicDim]) -> bool:
    """Check whether two shapes are known to be the same: a dimension without a name equals no other."""
    return len(first) == len(second) and all(map(is_same_size, first, second))


def is_same_size(first: int | ir.SymbolicDim, second: int | ir.SymbolicDim) -> bool:
    """Check whether two dimensions are known to be the same."""
    known = isinstance(first, int) or bool(first.value)
    return known and first == second
