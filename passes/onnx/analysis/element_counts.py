"""Counts the elements of each value of an ONNX model, as far as its shapes say, symbols included."""

from __future__ import annotations

import math
from typing import NamedTuple

import onnx_ir as ir

__all__ = ["ElementCounts", "Size"]

_PRESERVING = frozenset({
    "Abs", "Cast", "Flatten", "Gelu", "Identity", "Neg", "Relu", "Reshape", "Squeeze", "Tanh", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators whose first output has as many elements as their first input."""


class Size(NamedTuple):
    """A count of elements: `factor` times the product of `symbols`, which are sorted.

    A value of unknown shape has its own symbol. Other values share it only if they have the same count.
    """

    factor: int
    symbols: tuple[str, ...] = ()


class ElementCounts:
    """The sizes of a model's values; values that reshapes and casts connect share the known facts of each."""

    def __init__(self, model: ir.Model) -> None:
        self._parent: dict[ir.Value, ir.Value] = {}
        self._sizes: dict[ir.Value, Size] = {}
        self._unknown = 0
        for node in model.graph.all_nodes():
            if node.op_type in _PRESERVING and node.inputs and node.inputs[0] is not None:
                self._join(node.inputs[0], node.outputs[0])

    def __getitem__(self, value: ir.Value) -> Size:
        root = self._root(value)
        size = _size(value)
        if size is not None:
            self._sizes.setdefault(root, size)
            return size
        if root not in self._sizes:
            self._unknown += 1
            self._sizes[root] = Size(1, (f"?{self._unknown}",))
        return self._sizes[root]

    def _root(self, value: ir.Value) -> ir.Value:
        path = []
        while (parent := self._parent.get(value, value)) is not value:
            path.append(value)
            value = parent
        self._parent.update(dict.fromkeys(path, value))
        return value

    def _join(self, first: ir.Value, second: ir.Value) -> None:
        first, second = self._root(first), self._root(second)
        for value in (first, second):
            if (size := _size(value)) is not None:
                self._sizes.setdefault(value, size)
        if first is not second:
            self._parent[second] = first
            if second in self._sizes:
                self._sizes.setdefault(first, self._sizes[second])


def _size(value: ir.Value) -> Size | None:
    if value.shape is None:
        return None
    known = [dim for dim in value.shape if isinstance(dim, int)]
    symbols = [dim.value for dim in value.shape if not isinstance(dim, int)]
    if any(symbol is None for symbol in symbols):
        return None
    return Size(math.prod(known), tuple(sorted(str(symbol) for symbol in symbols)))
