"""A graph comes back from its plain values, from a pickle as well."""

from __future__ import annotations

import pickle

import torch
from torch.fx import Graph, GraphModule

from ort_dynamo.graph.serialized_graph import spelled

aten = torch.ops.aten


def graph_of(function: object) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("tangents_1")
    graph.output((graph.call_function(function, (x,)),))
    return GraphModule({}, graph)


def test_operators_and_names_come_back() -> None:
    found = spelled(graph_of(aten.sin.default))
    assert found.is_storable
    again = pickle.loads(pickle.dumps(found)).module({})
    assert [node.name for node in again.graph.nodes] == ["tangents_1", "sin_default", "output"]
    torch.testing.assert_close(again(torch.ones(2)), (torch.ones(2).sin(),))


def test_subgraphs_come_back() -> None:
    graph = Graph()
    x, condition = graph.placeholder("x"), graph.placeholder("condition")
    branches = (graph.get_attr("first"), graph.get_attr("second"))
    graph.output(graph.call_function(torch.ops.higher_order.cond, (condition, *branches, (x,))))
    inner = {name: graph_of(op) for name, op in (("first", aten.sin.default), ("second", aten.cos.default))}
    found = spelled(GraphModule(inner, graph))
    assert found.is_storable
    again = pickle.loads(pickle.dumps(found)).module({})
    for condition, function in ((True, torch.sin), (False, torch.cos)):
        (result,) = again(torch.ones(2), torch.tensor(condition))
        torch.testing.assert_close(result, function(torch.ones(2)))


def test_graph_with_user_objects_is_not_stored() -> None:
    assert not spelled(graph_of(lambda x: x)).is_storable
    graph = Graph()
    graph.output(graph.get_attr("constant"))
    gm = GraphModule({"constant": torch.ones(2)}, graph)
    assert not spelled(gm).is_storable
    torch.testing.assert_close(spelled(gm).module({})(), torch.ones(2))
