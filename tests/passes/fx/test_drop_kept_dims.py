"""Graph before, graph after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from ort_dynamo.marks import RECOMPUTE
from ort_dynamo.passes.fx.drop_kept_dims import DropKeptDims

aten = torch.ops.aten


def run(function: Callable[..., Any]) -> tuple[GraphModule, bool]:
    gm = make_fx(function, tracing_mode="symbolic")(torch.randn(2, 3, 4))
    return gm, run_twice(DropKeptDims(), gm)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum([0, 1], keepdim=True).view(4),
        lambda x: x.sum([-1], keepdim=True).squeeze(-1) * 2,
        lambda x: x.sum([1], keepdim=True).view(x.shape[0], x.shape[2]).t(),
        lambda x: aten.sum.dim_IntList(x, [], True).view([]),
    ],
    ids=["leading", "squeezed", "symbolic", "all"],
)
def test_dimensions_that_a_view_drops_are_not_kept(function: Callable[..., Any]) -> None:
    gm, modified = run(function)
    assert modified
    (total,) = gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert total.args[2] is False
    assert not {aten.view.default, aten.squeeze.dim} & {node.target for node in gm.graph.nodes}
    x = torch.randn(5, 6, 4)
    found, wanted = gm(x), function(x)
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)


def test_all_views_that_read_a_sum_become_it() -> None:
    def twice(x: Tensor) -> Tensor:
        y = x.sum([0], keepdim=True)
        return y.view(y.shape[1], y.shape[2]) * y.squeeze(0)

    gm, modified = run(twice)
    assert modified
    assert [n.target for n in gm.graph.nodes if n.op == "call_function" and "sym" not in str(n.target)] == [
        aten.sum.dim_IntList,
        aten.mul.Tensor,
    ]


def test_a_sum_that_is_computed_again_is_not_a_view_that_is_kept() -> None:
    gm = make_fx(lambda x: x.sum([0], keepdim=True).squeeze(0) * 2, tracing_mode="fake")(torch.randn(2, 3))
    (total,) = gm.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    total.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    assert not run_twice(DropKeptDims(), gm)
    del total.meta[RECOMPUTE]
    assert run_twice(DropKeptDims(), gm)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum([0], keepdim=True) * x,
        lambda x: x.sum([0], keepdim=True),
        lambda x: x.sum([0], keepdim=True).view(x.shape[2], x.shape[1]),
        lambda x: x.sum([0]).view(x.shape[1], x.shape[2]),
        lambda x: (y := x.sum([0], keepdim=True)).squeeze(0) * y.exp(),
    ],
    ids=["arithmetic", "the output", "other sizes", "not kept", "somebody else, too"],
)
def test_the_nearest_other_sums_stay(function: Callable[..., Any]) -> None:
    gm, modified = run(function)
    assert not modified
    x = torch.randn(5, 6, 4)
    assert torch.equal(gm(x), function(x))
