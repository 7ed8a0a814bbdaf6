"""Alias analysis of a graph, by view operators and schemas, never by fake storages."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import Graph, Node

from ort_dynamo.torch_internals.kernels.operators import OpOverload, aten, namespace, present, schema_of
from ort_dynamo.torch_internals.kernels.view_operators import MULTI_VIEWS, VIEWS

__all__ = ["AliasSets", "aliased_inputs", "returned_views", "seen_by_outputs"]

_c10d = namespace("_c10d_functional")

_HIDDEN = frozenset(present(dict.fromkeys((*VIEWS, *MULTI_VIEWS, _c10d.wait_tensor.default))))
"""Operators whose results alias their first argument, with or without an alias in the schema (`_unsafe_view`)."""


def aliased_inputs(node: Node) -> Sequence[Node]:
    """Return the inputs with which results of `node` may alias; of an unknown operator, all of them."""
    if node.op != "call_function":
        return node.all_input_nodes
    target: Any = node.target
    if target is operator.getitem or target in _HIDDEN:
        return node.all_input_nodes[:1]
    if not isinstance(target, OpOverload) or target.namespace not in _ANNOTATED:
        return node.all_input_nodes
    return list(_annotated(node, target))


_ANNOTATED = ("aten", "prims", "mkldnn")
"""Libraries whose schemas name aliases: torch tests its own."""


def _annotated(node: Node, target: OpOverload) -> Iterator[Node]:
    """Yield the inputs that a result aliases, according to the schema."""
    if all(result.alias_info is None for result in schema_of(target).returns):
        return
    for index, argument in enumerate(schema_of(target).arguments):
        if argument.alias_info is None:
            continue
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, Node):
                yield one


def seen_by_outputs(graph: Graph) -> set[Node]:
    """Return the nodes that an output of a graph is, or is a view of."""
    found: set[Node] = set()
    waiting = list(graph.output_node().all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += aliased_inputs(node)
    return found


def returned_views(graph: Graph) -> frozenset[int]:
    """Return the indices of a traced graph's outputs that are views to autograd, by their last operator.

    `detach` is a view operator, too, but its result is no view to autograd.
    """
    (output,) = graph.find_nodes(op="output")
    return frozenset(index for index, node in enumerate(output.args[0]) if isinstance(node, Node) and _is_view(node))


def _is_view(node: Node) -> bool:
    maker = node.args[0] if node.target is operator.getitem else node
    target = maker.target if isinstance(maker, Node) else None
    return (
        isinstance(target, OpOverload)
        and target is not aten.detach.default
        and not _restrides(node)
        and any(
            argument.alias_info is not None and not argument.alias_info.is_write
            for argument in schema_of(target).arguments
        )
    )


def _restrides(node: Node) -> bool:
    """Check whether a node sets a computed tensor's strides, as pooling to one pixel does in place in eager."""
    if node.target is not aten.as_strided.default or len(node.args) > 3 or node.kwargs:
        return False
    source: Any = node.args[0]
    shape = list(source.meta["val"].shape)
    is_fixed = all(type(size) is int for size in shape)  # a comparison of symbols would install a guard
    return is_fixed and source.op == "call_function" and shape == node.args[1]


class AliasSets:
    """Partitions the tensors of a graph into sets that may alias.

    Results of one operator are apart, unless they are views of one input or the operator is unknown.

    Args:
        graph: any graph of operators; inputs may alias nothing but themselves and their views.
    """

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Any, Any] = {}
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            for key in _results(node):
                self._parent[key] = key
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            if node.target is operator.getitem and node.args in self._parent:
                for key in _results(node):  # several if the part is a list: its tensors count as aliases
                    self._join(key, node.args)
                continue
            for source in aliased_inputs(node):
                for key in _results(node):
                    self._join(key, _results(source)[0] if _is_tuple(source) else source)
        self._members: dict[Any, list[Node]] = {}
        for node in graph.nodes:
            if node.op != "output" and not _is_tuple(node):
                self._members.setdefault(self._find(node), []).append(node)
        returned = [key for node in graph.output_node().all_input_nodes for key in _results(node)]
        self._returned = {self._find(key) for key in returned}
        self._given = {self._find(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}

    def of(self, node: Node) -> Sequence[Node]:
        """All nodes, in order, that may alias a tensor node, itself included."""
        return self._members[self._find(node)]

    def is_given(self, node: Node) -> bool:
        """Check whether a tensor node may alias an input of the graph."""
        return self._find(node) in self._given

    def is_private(self, node: Node) -> bool:
        """Check whether a tensor node aliases no input and no output of the graph.

        Only then may the node become an alias of another private one: a caller writes to inputs and outputs, and
        tensors that the forward saves are among its outputs.
        """
        return self._find(node) not in self._returned and not self.is_given(node)

    def may_merge(self, node: Node, other: Node) -> bool:
        """Check whether two tensor nodes may become aliases of each other without an effect that a caller could see."""
        return self.is_private(node) and self.is_private(other)

    def join(self, node: Node, other: Node) -> None:
        """Note that two tensor nodes alias from now on."""
        mine, theirs = self._find(node), self._find(other)
        if mine is theirs:
            return
        self._parent[mine] = theirs
        both = (*self._members[theirs], *self._members.pop(mine))
        self._members[theirs] = sorted(both, key=self._order.__getitem__)
        for marked in (self._returned, self._given):
            if mine in marked:
                marked.add(theirs)

    def _join(self, key: Any, other: Any) -> None:
        self._parent[self._find(key)] = self._find(other)

    def _find(self, key: Any) -> Any:
        while (parent := self._parent[key]) is not key:
            self._parent[key] = parent = self._parent[parent]
            key = parent
        return key


def _is_tuple(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _results(node: Node) -> Sequence[Any]:
    """Return the keys of a node's results: itself, or the pairs by which getitem nodes ask for parts of a tuple."""
    return [(node, index) for index in range(len(node.meta["val"]))] if _is_tuple(node) else [node]
