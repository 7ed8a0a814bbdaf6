"""Compares shapes of an ONNX model's values."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

__all__ = ["are_same_sizes"]


def are_same_sizes(first: Sequence[int | ir.SymbolicDim], second: Sequence[int | ir.SymbolicDim]) -> bool:
    """Check whether two shapes are known to be the same: a dimension without a name equals no other."""
    return len(first) == len(second) and all(map(_is_same, first, second))


def _is_same(first: int | ir.SymbolicDim, second: int | ir.SymbolicDim) -> bool:
    known = isinstance(first, int) or bool(first.value)
    return known and first == second
