"""Find nodes that a kernel recomputes, because their inputs have fewer bytes than their result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.constants import number_of
from ort_dynamo.passes.onnx.fused_kernels.computed_shapes import measured, measuring
from ort_dynamo.passes.onnx.fused_kernels.group import MOVES, Group
from ort_dynamo.passes.onnx.fused_kernels.kernel import WIDE

__all__ = ["Shared", "read_by", "repeated"]

_MOST_NODES = 20
"""Nodes that are recomputed for one input."""

_SIMPLE = MOVES | {
    *("Abs", "Add", "And", "Cast", "Clip", "Max", "Min", "Mul", "Neg", "Not", "Or", "Relu", "Sub", "Where"),
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
}
"""Operators of an instruction or two. Others, such as Exp, take about the time of reading a value."""


class _Making(NamedTuple):
    """A way to get a value.

    Attributes:
        nodes: nodes that are recomputed; none if the value is read.
        read: the values that are read, with their bytes.
    """

    nodes: frozenset[ir.Node]
    read: Mapping[ir.Value, int]


def repeated(
    nodes: Sequence[ir.Node], nbytes: Callable[[ir.Value], int], may_repeat: Callable[[ir.Node], bool]
) -> Iterator[frozenset[ir.Node]]:
    """Yield the nodes that a kernel recomputes instead of reading their results.

    First come all that pay, if a value that the kernel reads anyway is free for simple nodes; then all that pay
    without this; then half casts alone.

    Args:
        nodes: the nodes of the kernel.
        nbytes: the bytes of reading a value, and of writing it if only this reader needs it.
        may_repeat: whether a node is arithmetic, or changes a shape.
    """
    inputs, search = read_by(nodes), _Search(nbytes, may_repeat)
    given = {value for value in search.of(_elements_read_by(nodes)).read if not _is_made(value, may_repeat)}
    yield _Search(nbytes, may_repeat, given).of(inputs).nodes
    yield search.of(inputs).nodes
    yield _Search(nbytes, lambda node: may_repeat(node) and _widens(node)).of(inputs).nodes


def _is_made(value: ir.Value, may_repeat: Callable[[ir.Node], bool]) -> bool:
    producer = value.producer()
    return producer is not None and may_repeat(producer)


def _widens(node: ir.Node) -> bool:
    """Check whether a node casts a half type to the type that kernels compute it in, or changes a shape."""
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None
    if node.op_type != "Cast":
        return node.op_type in MOVES
    return source.dtype in WIDE and result.dtype == WIDE[source.dtype]


@dataclass(frozen=True)
class _Search:
    """Finds the cheapest way to get each value.

    Attributes:
        nbytes: the bytes of reading a value.
        may_repeat: whether a node may be recomputed.
        given: values that the kernel reads anyway.
        found: the results so far.
    """

    nbytes: Callable[[ir.Value], int]
    may_repeat: Callable[[ir.Node], bool]
    given: Set[ir.Value] = frozenset()
    found: dict[ir.Value, _Making] = field(default_factory=dict)

    def of(self, values: Iterable[ir.Value]) -> _Making:
        """Return the way to get some values."""
        return _all_of([self._cheapest(value) for value in values])

    def _cheapest(self, value: ir.Value, depth: int = 0) -> _Making:
        """Return the way to compute a value that reads the fewest bytes, by a chain of at most so many nodes."""
        if value in self.found:
            return self.found[value]
        as_is = _Making(frozenset(), {value: self.nbytes(value)})
        if depth > _MOST_NODES:
            return as_is
        self.found[value] = as_is
        node = value.producer()
        if node is None or len(node.outputs) != 1 or not self.may_repeat(node):
            return as_is
        sources = node.inputs[: 1 if node.op_type in MOVES else None]
        operands = [one for one in sources if one is not None and number_of(one) is None]
        again = _all_of([self._cheapest(one, depth + 1) for one in operands], node)
        if len(again.nodes) <= _MOST_NODES and self._more(again) < self._more(as_is):
            self.found[value] = again
        return self.found[value]

    def _more(self, making: _Making) -> int:
        """Return the bytes that a way adds to those that the kernel reads anyway."""
        is_simple = all(node.op_type in _SIMPLE for node in making.nodes)
        return sum(size for value, size in making.read.items() if not (is_simple and value in self.given))


def _all_of(parts: Iterable[_Making], *nodes: ir.Node) -> _Making:
    parts = list(parts)
    read = {leaf: size for part in parts for leaf, size in part.read.items()}
    return _Making(frozenset(nodes).union(*(part.nodes for part in parts)), read)


@dataclass(frozen=True)
class Shared:
    """Groups that each recompute some nodes of others.

    Attributes:
        chosen: the groups, without the nodes that they recompute.
        repeated: for each, these nodes.
        kept: the values that the graph returns.
    """

    chosen: Sequence[Group]
    repeated: Sequence[frozenset[ir.Node]]
    kept: set[ir.Value]

    def groups(self, in_order: Callable[[Iterable[ir.Node]], list[ir.Node]]) -> list[Group]:
        """Return the groups with the nodes that they recompute, and with the outputs that are then still read."""
        found = []
        for group, repeated in zip(self.chosen, self.repeated, strict=True):
            nodes = in_order([*group.nodes, *repeated])
            outputs = [value for node in group.nodes for value in node.outputs if self._is_read(value)]
            if outputs:
                found.append(Group(tuple(nodes), tuple(read_by(nodes)), tuple(outputs), group.columns))
        return found

    @cached_property
    def _home(self) -> dict[ir.Node, int]:
        return {node: index for index, group in enumerate(self.chosen) for node in group.nodes}

    def _is_read(self, value: ir.Value) -> bool:
        return value in self.kept or any(self._reads(reader, value) for reader, _ in value.uses())

    @cached_property
    def _repeating(self) -> dict[ir.Node, list[int]]:
        """Node -> the groups that recompute it."""
        found: dict[ir.Node, list[int]] = {}
        for index, nodes in enumerate(self.repeated):
            for node in nodes:
                found.setdefault(node, []).append(index)
        return found

    def _reads(self, reader: ir.Node, value: ir.Value) -> bool:
        """Check whether a node reads a value from outside of its group."""
        home, producer = self._home.get(reader), value.producer()
        assert producer is not None
        repeating = self._repeating.get(reader, ())
        if any(producer not in self.repeated[index] and index != self._home.get(producer) for index in repeating):
            return True  # by a recomputed node of a group
        if home is not None:
            return home != self._home.get(producer) and producer not in self.repeated[home]
        # A node that others recompute is itself computed only for the rest of its readers.
        return not repeating or any(map(self._is_read, reader.outputs))


def read_by(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    """Find the values that nodes read and do not make, without constants and operands that are part of the kernel.

    Last come tensors of which they need the shapes alone.
    """
    return list(dict.fromkeys([*_elements_read_by(nodes), *measured(measuring(nodes))]))


def _elements_read_by(nodes: Sequence[ir.Node]) -> dict[ir.Value, None]:
    inside, found = set(nodes), dict[ir.Value, None]()
    for node in nodes:
        is_placed = (node.op_type in MOVES and node.op_type != "Concat") or node.op_type.startswith("Reduce")
        for value in node.inputs[: 1 if is_placed else None]:
            if value is not None and value.producer() not in inside and number_of(value) is None:
                found[value] = None
    return found
