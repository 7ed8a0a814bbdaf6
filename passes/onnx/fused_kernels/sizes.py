"""Read the sizes of an ONNX model's values as products of integers and symbols."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from ort_dynamo.graph.fused_op import Size
from ort_dynamo.passes.onnx.fused_kernels.kernel import product

__all__ = ["ValueSizes", "dimension_of"]

_NUMBER = re.compile("[0-9]{1,18}")
_PRODUCT = re.compile(r"[\w*]+")
_SYMBOL = re.compile(r"[A-Za-z_]\w*")


def dimension_of(size: Size, symbols: Sequence[tuple[int, int]], inputs: Sequence[ir.Value]) -> int | ir.SymbolicDim:
    """Return a size of a kernel as a dimension, by the names of its symbols: a product of dimensions of the inputs.

    Args:
        size: the size.
        symbols: (index of an input, axis) of each symbol of the kernel.
        inputs: the inputs of the kernel.
    """
    if not size.symbols:
        return size.factor
    factors = [str(size.factor)] if size.factor != 1 else []
    for index, axis in (symbols[symbol] for symbol in size.symbols):
        shape = inputs[index].shape
        assert shape is not None
        factors.append(str(shape[axis]))
    if len(factors) > 1:
        factors = [one if _PRODUCT.fullmatch(one) else f"({one})" for one in factors]
    return ir.SymbolicDim("*".join(factors))


class ValueSizes:
    """Sizes in symbols that are numbered in order of appearance. A dimension that is no product is its own symbol."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._known: dict[ir.Value, tuple[Size, ...] | None] = {}

    def __call__(self, value: ir.Value) -> tuple[Size, ...]:
        """Return the shape of a value.

        Raises:
            LookupError: the shape is unknown.
        """
        if (found := self.find(value)) is None:
            raise LookupError(value.name)
        return found

    def find(self, value: ir.Value) -> tuple[Size, ...] | None:
        """Return the shape of a value; None if it is unknown."""
        if value not in self._known:
            self._known[value] = self._read(value.shape)
        return self._known[value]

    def count(self, value: ir.Value) -> Size:
        """Return the elements of a value of known shape."""
        return product(self(value))

    def _read(self, shape: ir.Shape | None) -> tuple[Size, ...] | None:
        found = [] if shape is None else [self._size(dim) for dim in shape]
        return None if shape is None or None in found else tuple(size for size in found if size is not None)

    def _size(self, dim: int | ir.SymbolicDim) -> Size | None:
        if isinstance(dim, int):
            return Size(dim)
        if dim.value is None:
            return None
        parts = dim.value.split("*")
        if not all(_NUMBER.fullmatch(part) or _SYMBOL.fullmatch(part) for part in parts):
            parts = [dim.value]
        return product(
            [Size(int(part)) if _NUMBER.fullmatch(part) else Size(1, (self._symbol(part),)) for part in parts]
        )

    def _symbol(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)
