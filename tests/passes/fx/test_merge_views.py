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
from ort_dynamo.passes.fx.merge_views import MergeViews

aten = torch.ops.aten


def traced(function: Callable[..., Any], mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(torch.randn(2, 3, 4))


def names(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_function" and "sym_size" not in node.name]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x: x.exp().transpose(0, 1).transpose(0, 1), ["exp"]),
        (lambda x: x.exp().permute(2, 0, 1).permute(1, 2, 0) * 2, ["exp", "mul"]),
        (lambda x: x.exp().expand(2, 3, 4).view(6, 4), ["exp", "view"]),
        (lambda x: (y := x.exp()).view(6, 4) @ y.view(-1, 4).t(), ["exp", "view", "t", "mm"]),
        (lambda x: x.view(6, 4).t() @ x.view(6, 4), ["view", "t", "mm"]),
        (lambda x: x.exp().view(2, 12).view(6, 4) * 2, ["exp", "view_1", "mul"]),
        (lambda x: x[1:].sum() * x[1:].exp(), ["slice_1", "sum_1", "exp", "mul"]),
        (lambda x: x.transpose(0, 1).transpose(0, 1).view(6, 4), ["view"]),
    ],
    ids=[
        "transposed twice",
        "permuted",
        "expanded by nothing",
        "equal",
        "of an input",
        "a view of a view",
        "a part",
        "an output that begins at an input",
    ],
)
def test_a_view_becomes_what_shows_the_same(function: Callable[..., Any], left: list[str]) -> None:
    gm = traced(function)
    assert run_twice(MergeViews(), gm)
    assert names(gm) == left
    x = torch.randn(2, 3, 4)
    assert torch.equal(gm(x), function(x))


def test_symbolic_sizes_are_compared_as_expressions() -> None:
    gm = traced(
        lambda x: x.exp().view(-1, 4).view(x.shape[0], x.shape[1], 4).transpose(0, 1).transpose(1, 0), "symbolic"
    )
    assert run_twice(MergeViews(), gm)
    assert names(gm) == ["exp"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.transpose(0, 1).transpose(0, 1),
        lambda x: ((y := x.exp()), y.transpose(0, 1).transpose(0, 1)),
        lambda x: (y := x.exp()).view(4, 6) @ y.view(6, 4),
        lambda x: (y := x.exp()).transpose(0, 1) + y.view(3, 2, 4),
        lambda x: x.exp().transpose(0, 1).view(3, 2, 2, 2).view(3, 2, 4, 1) * 2,
        lambda x: x[1:].sum() * x[:1],
        lambda x: x.exp().clone().view(6, 4) @ x.exp().view(6, 4).t(),
    ],
    ids=[
        "an input comes back",
        "two outputs",
        "other sizes",
        "other strides",
        "not contiguous",
        "another part",
        "of another tensor",
    ],
)
def test_the_nearest_other_views_stay(function: Callable[..., Any]) -> None:
    gm = traced(function)
    assert not run_twice(MergeViews(), gm)
    x = torch.randn(2, 3, 4)
    for found, wanted in zip(_tuple(gm(x)), _tuple(function(x)), strict=True):
        assert torch.equal(found, wanted)
        assert found is not x


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_a_view_of_an_input_that_is_written_to_stays() -> None:
    def function(x: Tensor) -> Tensor:
        before = x.view(6, 4).sum()
        x.copy_(x.exp())
        return before * x.view(6, 4)

    gm = traced(function)
    assert not run_twice(MergeViews(), gm)


def test_a_view_of_what_is_computed_again_is_read_where_it_is_kept() -> None:
    gm = traced(lambda x: x.exp().view(2, 12).view(6, 4) * 2)
    (exp,) = gm.graph.find_nodes(op="call_function", target=aten.exp.default)
    exp.meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    assert not run_twice(MergeViews(), gm)
    del exp.meta[RECOMPUTE]
    assert run_twice(MergeViews(), gm)


@pytest.mark.parametrize("which", [0, 1])
def test_a_view_that_is_computed_again_is_not_one_that_is_kept(which: int) -> None:
    gm = traced(lambda x: (y := x.exp()).view(6, 4).sum() * y.view(6, 4))
    views = gm.graph.find_nodes(op="call_function", target=aten.view.default)
    views[which].meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    assert not run_twice(MergeViews(), gm)
    views[1 - which].meta[RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
    assert run_twice(MergeViews(), gm)
