"""Compares shapes of an ONNX model's values."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

__all__ = ["RESHAPES", "are_same_sizes", "is_same_size"]

RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that change the shape of their first input, and no element."""


def are_same_sizes(first: Sequence[int | ir.SymbolicDim], second: Sequence[int | ir.SymbolicDim]) -> bool:
    """Check whether two shapes are known to be the same: a dimension without a name equals no other."""
    return len(first) == len(second) and all(map(is_same_size, first, second))


def is_same_size(first: int | ir.SymbolicDim, second: int | ir.SymbolicDim) -> bool:
    """Check whether two dimensions are known to be the same."""
    known = isinstance(first, int) or bool(first.value)
    return known and first == second
