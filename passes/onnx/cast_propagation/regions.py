"""Find the casts between float32 and a narrower dtype in an ONNX graph, and their cheapest places.

The nodes that may be narrowed get the label narrow or wide. A wide value needs a cast for its narrow readers, and a
narrow value one for its wide readers; readers share the cast. Other operands have the right dtype already. The labels
with the fewest cast elements are a minimum cut, with casts as edges. Among cuts of equal cost, the one with the most
narrow nodes is taken, since these move half the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_dynamo.passes.onnx.analysis.element_counts import ElementCounts, Size
from ort_dynamo.passes.onnx.cast_propagation.minimum_cut import SINK, SOURCE, FlowNetwork
from ort_dynamo.passes.onnx.cast_propagation.narrowing_rules import Operands, Proof

__all__ = ["Region", "find_regions", "foldable", "is_cast", "origin"]

_FOLDABLE_ELEMENTS = 1024
_GUESS = 512  # elements for each unknown dimension: only to choose among labels, never to accept one


def is_cast(node: ir.Node | None, to: ir.DataType, source: ir.DataType | None = None) -> bool:
    """Check whether a node is a Cast to `to`, and from `source` if that is given."""
    if node is None or node.op_type != "Cast" or node.domain or node.inputs[0] is None:
        return False
    return node.attributes.get_int("to") == to and source in (None, node.inputs[0].dtype)


def origin(value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Return the value of type `dtype` that `value` is a widened copy of, or `value` itself."""
    node = value.producer()
    return node.inputs[0] if is_cast(node, ir.DataType.FLOAT, dtype) else value  # type: ignore[union-attr,return-value]


def foldable(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the small constant that `value` is: converting it when the model is made costs no cast."""
    if value.is_graph_input() or (value.is_initializer() and value.const_value is None):
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return tensor if tensor is not None and tensor.size <= _FOLDABLE_ELEMENTS else None


@dataclass(frozen=True)
class Region:
    """Nodes to make narrow, in the graph's order."""

    nodes: dict[ir.Node, Operands]


@dataclass(frozen=True)
class _Cast:
    """A cast that exists, or that some labels would need.

    Attributes:
        size: the size of the value.
        narrowing: whether it casts to the narrow dtype.
        maker: the node that may be narrowed and computes the value; None if the value has a fixed dtype, the other
            one.
        always: whether a reader with a fixed dtype needs the cast.
        readers: the nodes that may be narrowed and read the value.
    """

    size: Size
    narrowing: bool
    maker: ir.Node | None
    always: bool
    readers: tuple[ir.Node, ...]

    def needed(self, narrow: Collection[ir.Node]) -> bool:
        """Check whether the cast is needed if the nodes `narrow` compute in the narrow type."""
        made_narrow = self.maker in narrow if self.maker is not None else not self.narrowing
        wanted = self.always or any((reader in narrow) == self.narrowing for reader in self.readers)
        return made_narrow != self.narrowing and wanted


@dataclass
class _Analysis:
    graph: ir.Graph
    dtype: ir.DataType
    sizes: ElementCounts
    candidates: dict[ir.Node, Operands]

    def casts(self) -> list[_Cast]:
        found: dict[ir.Value, None] = {}
        for node, operands in self.candidates.items():
            found.update((origin(_input(node, i), self.dtype), None) for i in operands.inputs)
            found.update((node.outputs[i], None) for i in operands.outputs)
        return [cast for value in found for cast in self._casts_of(value)]

    def reads_as_candidate(self, node: ir.Node, index: int) -> bool:
        operands = self.candidates.get(node)
        return operands is not None and index in operands.inputs

    def _casts_of(self, value: ir.Value) -> Iterable[_Cast]:
        uses, size = list(value.uses()), self.sizes[value]
        if value.dtype == self.dtype:  # always narrow: each widening of it is a separate cast
            for node in dict.fromkeys(use.node for use in uses if is_cast(use.node, ir.DataType.FLOAT)):
                wide = node.outputs[0]
                readers = tuple(use.node for use in wide.uses() if self.reads_as_candidate(*use))
                yield _Cast(size, False, None, wide.is_graph_output() or len(readers) < len(wide.uses()), readers)
            return
        producer = value.producer()
        maker = producer if producer in self.candidates and self._makes(producer, value) else None
        readers = tuple(use.node for use in uses if self.reads_as_candidate(*use))
        rounded = [use.node for use in uses if is_cast(use.node, self.dtype)]
        here = any(node.graph is self.graph for node in rounded)
        if here or foldable(value) is None:
            yield _Cast(size, True, maker, here, readers)
        for _ in {id(node.graph) for node in rounded if node.graph is not self.graph}:
            yield _Cast(size, True, maker, True, ())  # in a sub-graph of this one
        if maker is not None:
            fixed = value.is_graph_output() or len(uses) > len(readers) + len(rounded)
            yield _Cast(size, False, maker, fixed, readers)

    def _makes(self, node: ir.Node, value: ir.Value) -> bool:
        return value.index() in self.candidates[node].outputs


def find_regions(
    graph: ir.Graph,
    dtype: ir.DataType,
    sizes: ElementCounts,
    allowed: Callable[[ir.Node], Operands | None],
    proof: Callable[[ir.Node], Proof],
) -> list[Region]:
    """Find the disjoint sets of nodes whose narrowing does not add bytes to cast; each set is independent.

    Args:
        graph: main graph or subgraph; its subgraphs do not change.
        dtype: the narrow dtype.
        sizes: the sizes of the whole model.
        allowed: gives the operands of a node that may be narrowed.
        proof: the proof that is needed to narrow a node.
    """
    nodes = {node: operands for node in graph if (operands := allowed(node)) is not None}
    analysis = _Analysis(graph, dtype, sizes, _proven(nodes, dtype, proof))
    casts = analysis.casts()
    return [
        Region({node: analysis.candidates[node] for node in analysis.candidates if node in narrow})
        for component in _components(analysis.candidates, casts)
        if (narrow := _cheapest(component, _casts_of(component, casts)))
    ]


def _casts_of(component: Collection[ir.Node], casts: Iterable[_Cast]) -> list[_Cast]:
    """Return the casts that depend on the labels of these nodes."""
    return [cast for cast in casts if cast.maker in component or any(reader in component for reader in cast.readers)]


def _proven(
    nodes: Mapping[ir.Node, Operands], dtype: ir.DataType, proof: Callable[[ir.Node], Proof]
) -> dict[ir.Node, Operands]:
    """Return the nodes with enough known facts."""
    given: set[ir.Node] = set()
    wanted: set[ir.Node] = set()

    def is_given(value: ir.Value) -> bool:
        value = origin(value, dtype)
        maker = value.producer()
        passed_on = maker in given and proof(maker).passes_on and value.index() in nodes[maker].outputs
        return passed_on or value.dtype == dtype or _representable(value, dtype)

    def is_wanted(node: ir.Node, index: int) -> bool:
        passed_on = node in wanted and proof(node).passes_on and index in nodes[node].inputs
        return passed_on or is_cast(node, dtype)

    for node, operands in nodes.items():
        if all(is_given(_input(node, i)) for i in operands.inputs):
            given.add(node)
    for node, operands in reversed(list(nodes.items())):
        values = [node.outputs[i] for i in operands.outputs]
        uses = [use for value in values for use in value.uses()]
        if uses and all(is_wanted(*use) for use in uses) and not any(value.is_graph_output() for value in values):
            wanted.add(node)

    def proven(node: ir.Node) -> bool:
        match proof(node):
            case Proof.NOTHING:
                return True
            case Proof.GIVEN_OR_WANTED:
                return node in given or node in wanted
            case Proof.GIVEN_AND_WANTED:
                return node in given and node in wanted

    return {node: operands for node, operands in nodes.items() if proven(node)}


def _representable(value: ir.Value, dtype: ir.DataType) -> bool:
    """Check whether `value` is a small constant whose elements `dtype` holds exactly."""
    if (tensor := foldable(value)) is None:
        return False
    array = tensor.numpy()
    with np.errstate(over="ignore"):
        return bool(np.array_equal(array.astype(dtype.numpy()).astype(array.dtype), array, equal_nan=True))


def _components(candidates: Collection[ir.Node], casts: Iterable[_Cast]) -> list[set[ir.Node]]:
    """Candidates in sets that share no cast, in the graph's order; sets that no cast concerns are left out."""
    parent = {node: node for node in candidates}

    def root(node: ir.Node) -> ir.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    concerned: list[ir.Node] = []
    for cast in casts:
        members = [*([cast.maker] if cast.maker is not None else []), *cast.readers]
        for member in members[1:]:
            parent[root(member)] = root(members[0])
        if members and cast.needed(()):
            concerned.append(members[0])
    touched = {root(node) for node in concerned}
    found: dict[ir.Node, set[ir.Node]] = {}
    for node in candidates:
        if root(node) in touched:
            found.setdefault(root(node), set()).add(node)
    return list(found.values())


def _cheapest(component: set[ir.Node], casts: list[_Cast]) -> set[ir.Node]:
    """Return the nodes of a component to narrow; none if that would cast more elements.

    Symbolic sizes are compared symbol by symbol. If new casts outweigh removed ones in any symbol, new casts with this
    symbol are excluded, and the search runs again.
    """
    ruled_out: set[tuple[str, ...]] = set()
    while True:
        narrow = _cut(component, casts, ruled_out)
        change: Counter[tuple[str, ...]] = Counter()
        for cast in casts:
            change[cast.size.symbols] += cast.size.factor * (cast.needed(narrow) - cast.needed(()))
        worse = {symbols for symbols, elements in change.items() if elements > 0}
        if not worse:
            return narrow
        ruled_out |= worse


def _cut(
    component: set[ir.Node],
    casts: list[_Cast],
    ruled_out: Collection[tuple[str, ...]],
) -> set[ir.Node]:
    """Return the nodes on the narrow side of the minimum cut: fewest elements first, then fewest casts."""
    network = FlowNetwork()
    vertices = {node: network.vertex() for node in component}
    many = len(casts) + 1
    for cast in casts:
        cost: int | None = cast.size.factor * _GUESS ** len(cast.size.symbols) * many + 1
        if cast.size.symbols in ruled_out and not cast.needed(()):
            cost = None
        maker = vertices[cast.maker] if cast.maker is not None else (SINK if cast.narrowing else SOURCE)
        want, middle = (SOURCE if cast.narrowing else SINK), network.vertex()
        for reader in [*([want] if cast.always else []), *(vertices[reader] for reader in cast.readers)]:
            # A reader on its side of the cut pulls the cast along; the cast is cut if the maker is on the other.
            network.edge(*((reader, middle) if cast.narrowing else (middle, reader)), None)
        network.edge(*((middle, maker) if cast.narrowing else (maker, middle)), cost)
    side = network.source_side()
    return {node for node in component if vertices[node] in side}


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value
