"""Graph before, graph after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_twice import run_twice
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.passes.fx.analysis.saved_tensors import JointGraph
from ort_dynamo.passes.fx.analysis.storage import storages_of
from ort_dynamo.passes.fx.analysis.views import ALIASES
from ort_dynamo.passes.fx.remove_no_ops import RemoveNoOps


def run(function: Callable[..., Any]) -> tuple[GraphModule, bool]:
    gm = make_fx(function, tracing_mode="fake")(torch.ones(2, 3))
    return gm, run_twice(RemoveNoOps(), gm)


def test_a_clone_that_is_only_computed_with_goes() -> None:
    gm, modified = run(lambda x: (x + 1).clone().view(3, 2) * 2)
    assert modified
    assert [n.name for n in gm.graph.nodes] == ["x_1", "add", "view", "mul", "output"]


def test_a_detach_that_is_only_computed_with_goes() -> None:
    gm, modified = run(lambda x: (x + 1).detach().view(3, 2) * 2)
    assert modified
    assert [n.name for n in gm.graph.nodes] == ["x_1", "add", "view", "mul", "output"]


def test_a_gradient_reads_its_operators_result_under_one_name(joint_graph: Callable[..., GraphModule]) -> None:
    # The fixture has run the pass.
    gm = joint_graph(lambda x: (x.tanh() * 2).exp().sum(), torch.randn(4, requires_grad=True))
    assert [n.name for n in JointGraph(gm).read_by_backward] == ["tanh", "exp"]
    assert not any(n.target in ALIASES for n in gm.graph.nodes)


def test_views_of_the_copy_are_then_views_of_the_original() -> None:
    gm, modified = run(lambda x: (x + 1).clone().t().split(2)[0].exp() * 2)
    assert modified
    values = {node.name: node for node in gm.graph.nodes}
    for view in ("t", "split", "getitem"):
        assert storages_of(values[view]) == storages_of(values["add"])
    assert storages_of(values["exp"]).isdisjoint(storages_of(values["add"]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1).clone(),
        lambda x: (x + 1).clone().t()[0],
        lambda x: (x + 1).t().clone(memory_format=torch.contiguous_format) * 2,
        lambda x: (x + 1).clone().split(1),
        lambda x: x.clone() * 2,
        lambda x: x.t().clone() * 2,
    ],
    ids=["the output", "a view is the output", "other strides", "pieces", "of an input", "of a view of an input"],
)
def test_the_nearest_other_clones_stay(function: Callable[..., Any]) -> None:
    gm, modified = run(function)
    assert not modified
    assert "clone" in [n.name for n in gm.graph.nodes]


@pytest.mark.parametrize(
    "function",
    [lambda x: (x + 1).detach(), lambda x: (x + 1).detach().t()[0], lambda x: x.detach() * 2],
    ids=["the output", "a view is the output", "of an input"],
)
def test_the_nearest_other_detaches_stay(function: Callable[..., Any]) -> None:
    gm, modified = run(function)
    assert not modified
    assert sum(n.target in ALIASES for n in gm.graph.nodes) == 1
