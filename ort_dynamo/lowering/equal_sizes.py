"""Give sizes that guards make equal one name, by which ONNX passes see that they are equal."""

from __future__ import annotations

import itertools

import onnx_ir as ir
import sympy
import torch
from torch.fx import Node

from ort_dynamo.torch_internals.fakes import fakes_around
from ort_dynamo.torch_internals.sizes.symbols import given_expression, known_true

__all__ = ["EqualSizes"]


class EqualSizes:
    """The symbolic sizes of a graph that are written in different ways, and are equal.

    torch replaces a size symbol by another one that equals it, but keeps products: after a cross-entropy of flattened
    batches it has a guard that `s0*s1` equals `s2*s3`, and uses both.
    """

    def __init__(self) -> None:
        self._same: dict[str, str] = {}

    def add(self, node: Node) -> None:
        """Ask which sizes of a node's arguments and results are equal. Installs no guard.

        The question is asked of products, sums and the like of different symbols alone, since sizes such as `s0` and
        `s0*s1` are hardly ever equal.
        """
        found = (size for fake in fakes_around(node) for size in fake.shape if isinstance(size, torch.SymInt))
        sizes = {given_expression(size): size for size in found}
        for (first, one), (second, other) in itertools.combinations(sizes.items(), 2):
            if _may_be_equal(first, second) and known_true(one == other):
                self._join(self.name(str(first)), self.name(str(second)))

    def name(self, size: str) -> str:
        """Return the name of a size, which may be its own."""
        while size in self._same:
            size = self._same[size]
        return size

    def _join(self, first: str, second: str) -> None:
        if first != second:
            self._same[second] = first

    def rename_in(self, graph: ir.Graph) -> None:
        """Give equal dimensions of a graph's values, and of those of its branches, one name."""
        if not self._same:
            return
        for value in (*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)):
            if value.shape is not None:
                value.shape = ir.Shape([dim if isinstance(dim, int) else self._renamed(dim) for dim in value.shape])

    def _renamed(self, dim: ir.SymbolicDim) -> ir.SymbolicDim:
        return dim if dim.value is None else ir.SymbolicDim(self.name(dim.value))


def _may_be_equal(first: sympy.Expr, second: sympy.Expr) -> bool:
    of_first, of_second = first.free_symbols, second.free_symbols
    return not (first.is_Symbol and second.is_Symbol) and not of_first <= of_second and not of_second <= of_first
