"""Compares and counts shapes of an ONNX model's values, and looks behind nodes that change a shape alone."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

import onnx_ir as ir

__all__ = [
    "RESHAPES",
    "are_same_sizes",
    "behind",
    "is_same_size",
    "known_sizes",
    "likely_count",
    "reshape_sizes",
    "size_of",
    "words_of",
]

_LIKELY = 16
"""The size that a dimension without a known one counts as."""

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


def known_sizes(dims: Sequence[int | ir.SymbolicDim]) -> tuple[int, ...] | None:
    """Return dimensions of known sizes; None if one is unknown."""
    sizes = tuple(dim for dim in dims if isinstance(dim, int))
    return sizes if len(sizes) == len(dims) else None


def likely_count(dims: Sequence[int | ir.SymbolicDim]) -> int:
    """Count the elements of a shape, where a dimension of unknown size counts as 16."""
    return math.prod(dim if isinstance(dim, int) else _LIKELY for dim in dims)


def reshape_sizes(dims: Sequence[int | ir.SymbolicDim]) -> list[int] | None:
    """Return the sizes by which a Reshape gives a shape, with -1 for an unknown one; None if several are unknown."""
    sizes = [dim if isinstance(dim, int) else -1 for dim in dims]
    return sizes if sizes.count(-1) <= 1 else None


def size_of(dims: Sequence[int | ir.SymbolicDim]) -> int | ir.SymbolicDim:
    """Return the size of dimensions that become one; a symbol without a name if one is unknown."""
    sizes = known_sizes(dims)
    return ir.SymbolicDim(None) if sizes is None else math.prod(sizes)


def words_of(value: ir.Value | None) -> int:
    """Return how many times four bytes, at least one, an element of a value has; 1 for unknown dtypes."""
    return 1 if value is None or value.dtype is None else max(1, int(value.dtype.itemsize) // 4)
