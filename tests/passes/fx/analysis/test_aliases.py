"""Tests of the alias analysis against the storages of real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.passes.fx.analysis.aliases import AliasSets, aliased_inputs

aten = torch.ops.aten


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def named(gm: GraphModule) -> dict[str, Node]:
    return {node.name: node for node in gm.graph.nodes}


class _Memory(Interpreter):
    """Runs a graph and notes where each tensor lives."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.places: dict[Node, int] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op != "output":
            self.places[n] = result.untyped_storage().data_ptr()
        return result


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "views": lambda x: (x + 1).t().unsqueeze(0)[:, 1:].expand(3, 5, 4) * 2,
    "hidden views": lambda x: aten._unsafe_view(x + 1, [24]).sin(),
    "a reshape that is a view": lambda x: aten.reshape(x + 1, [24]).sin(),
    "pieces": lambda x: [one * 2 for one in (x + 1).split(2)] + [one * 3 for one in (x + 2).unbind(1)],
    "chunks": lambda x: aten.unsafe_split((x + 1), 2)[1] * 2,
    "results of one operator": lambda x: aten.native_layer_norm(x, [6], None, None, 1e-5),
    "a list among the results": lambda x: aten._amp_foreach_non_finite_check_and_unscale(
        [x + 1, x + 2], x[0, :1] * 0, x[0, :1] * 0 + 2
    ),
    "results in place": lambda x: aten.relu_(x + 1).t(),
    "written where told": lambda x: aten.tanh_backward.grad_input(g := x + 1, x, grad_input=g),
    "contiguous": lambda x: [(x + 1).contiguous(), (x + 1).t().contiguous()],
    "detached": lambda x: (x + 1).detach().view(-1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nodes_whose_tensors_share_memory_are_in_one_set(name: str) -> None:
    x = torch.randn(4, 6)
    gm = graph_of(FUNCTIONS[name], x)
    memory = _Memory(gm)
    memory.run(x)
    aliases = AliasSets(gm.graph)
    for node, place in memory.places.items():
        sharing = {one for one, other in memory.places.items() if other == place}
        assert sharing <= set(aliases.of(node)), node


def test_results_of_one_operator_are_apart_and_so_are_computed_ones() -> None:
    gm = graph_of(lambda x: [y := aten.native_layer_norm(x, [6], None, None, 1e-5)[0], y.sin()], torch.randn(4, 6))
    nodes, aliases = named(gm), AliasSets(gm.graph)
    assert aliases.of(nodes["getitem"]) == [nodes["getitem"]]
    assert aliases.of(nodes["sin"]) == [nodes["sin"]]


def test_a_copy_that_may_turn_out_a_view_counts_as_one() -> None:
    gm = graph_of(lambda x: (x + 1).t().contiguous() * 2, torch.randn(4, 6))
    clone = named(gm)["clone"]
    assert not aliased_inputs(clone)
    clone.target, clone.kwargs = aten.contiguous.default, {}
    assert list(aliased_inputs(clone)) == [named(gm)["t"]]


def test_an_unknown_function_shares_memory_with_all_that_it_reads() -> None:
    gm = graph_of(lambda x: torch.maximum(x + 1, x + 2) * 2, torch.randn(4, 6))
    nodes = named(gm)
    nodes["maximum"].target = lambda a, b: a
    aliases = AliasSets(gm.graph)
    assert set(aliases.of(nodes["add"])) == {nodes["add"], nodes["add_1"], nodes["maximum"]}
    assert not aliases.may_merge(nodes["x_1"], nodes["mul"])


def test_only_values_private_to_the_graph_may_be_merged() -> None:
    def function(x: Tensor) -> Any:
        inner = x * 2
        return inner.clone() + 1, (x + 3).t(), x.t().clone() + 2

    gm = graph_of(function, torch.randn(4, 6))
    nodes, aliases = named(gm), AliasSets(gm.graph)
    private = {name for name, node in nodes.items() if node.op == "call_function" and aliases.is_private(node)}
    assert private == {"mul", "clone", "clone_1"}
    assert aliases.may_merge(nodes["mul"], nodes["clone"])
    assert not aliases.may_merge(nodes["t_1"], nodes["clone_1"])  # a view of an input


def test_joined_sets_are_one_in_the_order_of_the_graph() -> None:
    gm = graph_of(lambda x: ((x + 1) * 2).sin().t(), torch.randn(4, 6))
    nodes, aliases = named(gm), AliasSets(gm.graph)
    aliases.join(nodes["sin"], nodes["add"])
    assert [node.name for node in aliases.of(nodes["t"])] == ["add", "sin", "t"]
    assert not aliases.is_private(nodes["add"])
