"""Compute many tensors by one call of torch's, which launches one kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.graph.marks import CHOSEN
from ort_dynamo.passes.fx.torch_graph.whole_kernels import FOREACH, is_count, is_plain_cast
from ort_dynamo.passes.ordering import Condition, ordering

__all__ = ["CallForeach", "add_to_all", "cast_all"]

_MOST_BYTES = 64 << 20
"""Maximum bytes of the results of one call: a result that is computed early, or read late, is in memory longer."""


def cast_all(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Cast tensors to a type.

    Args:
        tensors: dense tensors of one dtype on one device, of any shapes.
        dtype: the type of the results, which have the strides of the tensors.
    """
    results = [torch.empty_like(one, dtype=dtype) for one in tensors]
    torch._foreach_copy_(results, list(tensors))
    return results


def add_to_all(tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Add a scalar to tensors.

    Args:
        tensors: int64 tensors of one element, on one device.
        number: the scalar to add.
    """
    return list(torch._foreach_add(list(tensors), number))


@dataclass
class _Call:
    """Nodes that become one call.

    Attributes:
        nodes: nodes of one kind.
        nbytes: the bytes of their results.
        first: the index of their last input in the graph.
        last: the index of the first node that reads one of them.
    """

    nodes: list[Node] = field(default_factory=list)
    nbytes: int = 0
    first: int = -1
    last: int = 1 << 62


@ordering(needs=[Condition.FUNCTIONAL])
@dataclass(frozen=True)
class CallForeach(PassBase):
    """Replace nodes that PlaceForeach marked by `foreach` calls of torch, each of at most 64 MiB of results.

    A call comes before the first node that reads one of its results. If only the caller reads them, it comes after the
    last of its inputs.
    """

    name: str = "call_foreach"

    def call(self, graph_module: GraphModule) -> PassResult:
        """Rewrite an outer graph in place."""
        graph = graph_module.graph
        nodes = list(graph.nodes)
        position = {node: index for index, node in enumerate(nodes)}
        marked = [node for node in nodes if node.meta.get(CHOSEN) == FOREACH and _kind(node) is not None]
        calls = [call for call in _calls(marked, position) if len(call.nodes) > 1]
        for call in calls:
            before = nodes[call.first + 1] if nodes[call.last].op == "output" else nodes[call.last]
            while before.op == "placeholder":
                before = before.next
            with graph.inserting_before(before):
                _write(graph, call.nodes)
        if calls:
            graph.lint()
            graph_module.recompile()
        return PassResult(graph_module, bool(calls))


def _kind(node: Node) -> tuple[Callable[..., Any], Any, Hashable] | None:
    """Return the function that computes a node and its likes, its argument, and their other common facts."""
    if is_count(node):
        return add_to_all, node.args[1], node.meta["val"].device
    if is_plain_cast(node):
        source: Any = node.args[0]
        fake = node.meta["val"]
        return cast_all, fake.dtype, (source.meta["val"].dtype, fake.device)
    return None


def _calls(nodes: Sequence[Node], position: Mapping[Node, int]) -> Iterator[_Call]:
    """Group nodes of one kind that one place in the graph can compute."""
    current: dict[Any, _Call] = {}
    for node in sorted(nodes, key=lambda one: min(position[user] for user in one.users)):
        kind, fake = _kind(node), node.meta["val"]
        call = current.setdefault(kind, _Call())
        first, last = position[node.all_input_nodes[0]], min(position[user] for user in node.users)
        nbytes = fake.numel() * fake.element_size()
        if call.nodes and (call.nbytes + nbytes > _MOST_BYTES or max(call.first, first) >= min(call.last, last)):
            yield call
            call = current[kind] = _Call()
        call.nodes.append(node)
        call.nbytes += nbytes
        call.first, call.last = max(call.first, first), min(call.last, last)
    yield from current.values()


def _write(graph: Graph, nodes: Sequence[Node]) -> None:
    """Replace several nodes by one call, at the graph's insertion point."""
    kind = _kind(nodes[0])
    assert kind is not None
    function, argument, _ = kind
    made = graph.call_function(function, ([node.args[0] for node in nodes], argument))
    made.meta = {CHOSEN: FOREACH}  # its results have values, it has none
    items = [graph.call_function(operator.getitem, (made, index)) for index in range(len(nodes))]
    for item, node in zip(items, nodes, strict=True):  # which may be where the graph inserts
        item.meta = dict(node.meta)
        node.replace_all_uses_with(item)
        graph.erase_node(node)
