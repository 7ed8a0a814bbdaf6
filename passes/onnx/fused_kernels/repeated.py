"""Find nodes that a kernel recomputes, because their inputs have fewer bytes than their result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.constants import number_of
from ort_dynamo.passes.onnx.fused_kernels.computed_shapes import measured, measuring
from ort_dynamo.passes.onnx.fused_kernels.group_kernel import MOVES, Group
from ort_dynamo.passes.onnx.fused_kernels.kernel import WIDE

__all__ = ["Shared", "read_by", "repeated"]

_MOST_NODES = 12
"""Nodes that are recomputed for one input."""


class _Making(NamedTuple):
    """A way to get a value.

    Attributes:
        nodes: nodes that are recomputed; none if the value is read.
        read: the values that are read, with their bytes.
    """

    nodes: frozenset[ir.Node]
    read: Mapping[ir.Value, int]

    @property
    def nbytes(self) -> int:
        return sum(self.read.values())


def repeated(
    inputs: Iterable[ir.Value], nbytes: Callable[[ir.Value], int], may_repeat: Callable[[ir.Node], bool]
) -> Iterator[frozenset[ir.Node]]:
    """Yield the nodes that a kernel recomputes instead of reading their results: all that pay, then only half casts.

    Args:
        inputs: the values that the kernel would read.
        nbytes: the bytes of reading a value, and of writing it if only this reader needs it.
        may_repeat: whether a node is arithmetic, or changes a shape.
    """
    inputs = list(inputs)
    for is_repeated in (may_repeat, lambda node: may_repeat(node) and _widens(node)):
        found: dict[ir.Value, _Making] = {}
        yield frozenset(node for value in inputs for node in _cheapest(value, nbytes, is_repeated, found).nodes)


def _widens(node: ir.Node) -> bool:
    """Check whether a node casts a half type to the type that kernels compute it in, or changes a shape."""
    source, result = node.inputs[0], node.outputs[0]
    assert source is not None
    if node.op_type != "Cast":
        return node.op_type in MOVES
    return source.dtype in WIDE and result.dtype == WIDE[source.dtype]


def _cheapest(
    value: ir.Value,
    nbytes: Callable[[ir.Value], int],
    may_repeat: Callable[[ir.Node], bool],
    found: dict[ir.Value, _Making],
    depth: int = 0,
) -> _Making:
    """Return the way to compute a value that reads the fewest bytes, by a chain of at most so many nodes."""
    if value in found:
        return found[value]
    if depth > _MOST_NODES:
        return _Making(frozenset(), {value: nbytes(value)})
    as_is = found[value] = _Making(frozenset(), {value: nbytes(value)})
    node = value.producer()
    if node is None or len(node.outputs) != 1 or not may_repeat(node):
        return as_is
    is_reshape = node.op_type in MOVES
    operands = [one for one in node.inputs[: 1 if is_reshape else None] if one is not None and number_of(one) is None]
    parts = [_cheapest(one, nbytes, may_repeat, found, depth + 1) for one in operands]
    nodes = frozenset({node}).union(*(part.nodes for part in parts))
    again = _Making(nodes, {leaf: size for part in parts for leaf, size in part.read.items()})
    pays = again.nbytes < as_is.nbytes and len(nodes) <= _MOST_NODES
    found[value] = again if pays else as_is
    return found[value]


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
    inside, found = set(nodes), dict[ir.Value, None]()
    for node in nodes:
        is_placed = (node.op_type in MOVES and node.op_type != "Concat") or node.op_type.startswith("Reduce")
        for value in node.inputs[: 1 if is_placed else None]:
            if value is not None and value.producer() not in inside and number_of(value) is None:
                found[value] = None
    return list(dict.fromkeys([*found, *measured(measuring(nodes))]))
