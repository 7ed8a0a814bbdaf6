"""Symbolic sizes as nodes: read from placeholders, each once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.passes.fx.analysis.size_nodes import SizeNodes

aten = torch.ops.aten


def trace(function: Any, *args: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="symbolic")(*args)


def inputs_of(gm: GraphModule) -> Graph:
    """A graph with the placeholders of `gm` alone."""
    graph = Graph()
    for node in gm.graph.find_nodes(op="placeholder"):
        graph.node_copy(node)
    return graph


def sizes_of(gm: GraphModule) -> tuple[Any, ...]:
    (output,) = gm.graph.find_nodes(op="output")
    (result,) = output.all_input_nodes
    return tuple(result.meta["val"].shape)


def halved(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0] * y.shape[1] + 3, x.shape[0] // 2, 7))


def test_a_size_is_computed_from_the_inputs_sizes() -> None:
    traced = trace(halved, torch.ones(6, 4), torch.ones(3, 5))
    graph = inputs_of(traced)
    sizes = SizeNodes(graph)
    graph.output(tuple(map(sizes.number, sizes_of(traced))))
    gm = GraphModule(torch.nn.Module(), graph)
    assert gm(torch.ones(6, 4), torch.ones(3, 5)) == (33, 3, 7)
    assert gm(torch.ones(9, 4), torch.ones(3, 2)) == (21, 4, 7)


def test_each_size_is_made_once_and_every_node_knows_its_value() -> None:
    traced = trace(halved, torch.ones(6, 4), torch.ones(3, 5))
    graph = inputs_of(traced)
    sizes = SizeNodes(graph, {"partitioner_tag": "is_forward"})
    first = list(map(sizes.number, sizes_of(traced)))
    count = len(graph.nodes)
    assert list(map(sizes.number, sizes_of(traced))) == first
    assert len(graph.nodes) == count
    made = [node for node in graph.nodes if node.op == "call_function"]
    assert sum(node.target is aten.sym_size.int for node in made) == 2
    assert all(isinstance(node.meta["val"], torch.SymInt) for node in made)
    assert {node.meta["partitioner_tag"] for node in made} == {"is_forward"}


def test_a_number_that_comes_in_as_such_is_taken_as_it_is() -> None:
    traced = trace(lambda x: x + 1, torch.ones(6))
    (size,) = sizes_of(traced)
    graph = Graph()
    number: Node = graph.placeholder("number")
    number.meta["val"] = size
    assert SizeNodes(graph).number(size) is number
    assert SizeNodes(graph).number(5) == 5


@pytest.mark.parametrize("times", [1, 2])
def test_a_symbol_that_no_placeholder_carries_has_no_node(times: int) -> None:
    (size,) = sizes_of(trace(lambda x: x + 1, torch.ones(6)))
    graph = Graph()
    assert SizeNodes(graph).number(size * times) is None
    assert not len(graph.nodes)
