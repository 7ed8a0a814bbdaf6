"""Finds the layers of a network in its joint graph: by its modules, else by the graph's own shape."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph, is_tensor
from ort_dynamo.passes.fx.analysis.storage import storage_of

__all__ = ["Layer", "find_layers"]


@dataclass(frozen=True)
class Layer:
    """One layer: a contiguous piece of the forward that repeats.

    Attributes:
        name: the module's path, or "nodes <first> to <last>".
        nodes: its forward nodes, in order.
    """

    name: str
    nodes: tuple[Node, ...]


def find_layers(joint: JointGraph) -> list[Layer]:
    """Return the network's layers in the order in which they run; fewer than two mean that none were found.

    1. Modules that are numbered siblings of one class (`encoder.layer.0`, `layer1`) and save at least two tensors
       each, outermost first: transformer layers of any kind, the stages of a convolutional net.
    2. Where modules say nothing (a function, one module applied many times): the graph is cut wherever all gradient
       flows through a single tensor; the pieces between cuts that repeat, operator by operator, over the period that
       covers most of the graph, are layers.
    """
    layers = _by_modules(joint)
    return layers if len(layers) > 1 else _by_bottlenecks(joint)


# -- by modules --------------------------------------------------------------------------------------------------

_NUMBERED = re.compile(r"^(?P<siblings>.*?)[.\[_]?(?P<number>\d+)\]?$")


def _by_modules(joint: JointGraph) -> list[Layer]:
    members: dict[tuple[str, str], dict[str, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for node in joint.forward:
        for path, kind in _modules(node):
            match = _NUMBERED.match(path)
            if match:
                members[match["siblings"], kind][path].append(node)
    read = set(joint.read_by_backward)
    groups = [
        group
        for group in members.values()
        if len(group) > 1 and all(_keeps_several(joint, nodes, read) for nodes in group.values())
    ]
    layers: list[Layer] = []
    taken: set[Node] = set()
    for group in sorted(groups, key=lambda group: -sum(map(len, group.values()))):
        if taken.isdisjoint(node for nodes in group.values() for node in nodes):
            layers += [Layer(path, tuple(nodes)) for path, nodes in group.items()]
            taken.update(node for nodes in group.values() for node in nodes)
    return sorted(layers, key=lambda layer: joint.position(layer.nodes[0]))


def _modules(node: Node) -> list[tuple[str, str]]:
    """(path, class) of the modules around a node, outermost first; taking a tuple apart is part of making it."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return _modules(node.args[0])
    stack = node.meta.get("nn_module_stack") or {}
    return [(path, kind if isinstance(kind, str) else kind.__qualname__) for path, kind in stack.values()]


def _keeps_several(joint: JointGraph, nodes: Sequence[Node], read: set[Node]) -> bool:
    storages = {storage_of(node) for node in nodes if node in read}
    return len(storages - joint.inputs) > 1


# -- by the graph's shape ----------------------------------------------------------------------------------------


def _by_bottlenecks(joint: JointGraph) -> list[Layer]:
    pieces = [part for piece in _cut(joint, joint.forward, frozenset()) for part in _refined(joint, piece)]
    read = set(joint.read_by_backward)
    layers = []
    for begin, period, count in _repetitions([_signature(joint, piece) for piece in pieces]):
        groups = [
            [node for piece in pieces[first : first + period] for node in piece]
            for first in range(begin, begin + count * period, period)
        ]
        if all(_keeps_several(joint, nodes, read) for nodes in groups):
            layers += [Layer(f"nodes {nodes[0].name} to {nodes[-1].name}", tuple(nodes)) for nodes in groups]
    return layers


def _signature(joint: JointGraph, piece: Sequence[Node]) -> tuple[str, ...]:
    return tuple(str(node.target) for node in piece if node in joint.differentiable)


_LARGE = 0.2
_NEARLY_ALL = 0.7


def _refined(joint: JointGraph, piece: list[Node]) -> list[list[Node]]:
    """Cut a large piece, ignoring values that are alive in nearly all of it, if most of it then repeats.

    Such values are the encoder's result in a decoder, and the position bias in T5.
    """
    if len(piece) < _LARGE * len(joint.forward):
        return [piece]
    parts = _cut(joint, piece, _through(joint, piece))
    signatures = [_signature(joint, part) for part in parts]
    covered = sum(
        len(node) for b, period, count in _repetitions(signatures) for node in signatures[b : b + period * count]
    )
    return parts if covered > sum(map(len, signatures)) / 2 else [piece]


def _cut(joint: JointGraph, nodes: Sequence[Node], besides: frozenset[int]) -> list[list[Node]]:
    pieces: list[list[Node]] = [[]]
    living: set[int] = set()
    for node in nodes:
        pieces[-1].append(node)
        if node in joint.differentiable and is_tensor(node) and storage_of(node) not in joint.inputs | besides:
            living.add(storage_of(node))
        here = joint.position(node)
        living = {storage for storage in living if joint.last_uses.get(storage, -1) > here}
        if len(living) == 1 and node in joint.differentiable:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _through(joint: JointGraph, nodes: Sequence[Node]) -> frozenset[int]:
    """Allocations that live through nearly all of `nodes`."""
    begin, end = joint.position(nodes[0]), joint.position(nodes[-1])
    latest = begin + (1 - _NEARLY_ALL) * (end - begin)
    made: dict[int, int] = {}
    for node in joint.forward:
        if node in joint.differentiable and is_tensor(node):
            made.setdefault(storage_of(node), joint.position(node))
    return frozenset(
        storage
        for storage, position in made.items()
        if position <= latest and joint.last_uses.get(storage, -1) - max(position, begin) >= _NEARLY_ALL * (end - begin)
    )


def _repetitions(
    signatures: Sequence[tuple[str, ...]], begin: int = 0, end: int | None = None
) -> list[tuple[int, int, int]]:
    """Find the repetitions between `begin` and `end`, as (begin, period, count), in order.

    It takes the one that covers the most operators, with the shortest period, and then searches on both sides of it.
    """
    end = len(signatures) if end is None else end
    best, covered = None, 0
    for period in range(1, (end - begin) // 2 + 1):
        first = begin
        while first + 2 * period <= end:
            block = signatures[first : first + period]
            count = 1
            while signatures[first + count * period : min(first + (count + 1) * period, end)] == block:
                count += 1
            nodes = count * sum(map(len, block))
            if count > 1 and nodes > covered:
                best, covered = (first, period, count), nodes
            first += (count - 1) * period + 1
    if best is None:
        return []
    first, period, count = best
    before = _repetitions(signatures, begin, first)
    return [*before, best, *_repetitions(signatures, first + period * count, end)]
