"""Graph before, graph after, and equality of the draws with eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from ort_dynamo.marks import DRAWN
from ort_dynamo.passes.fx.hoist_random import HoistRandom
from ort_dynamo.testing import assert_like_eager

aten = torch.ops.aten


def trace(function: Callable[..., Any], *args: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def text(gm: GraphModule) -> list[str]:
    return [f"{n.name} = {n.target}{n.args}" for n in gm.graph.nodes if n.op == "call_function"]


def test_dropout_becomes_a_drawn_mask_and_eagers_formula() -> None:
    gm = trace(lambda x: aten.native_dropout(x, 0.25, True), torch.ones(2, 3))
    result = HoistRandom()(gm)
    assert result is not None
    assert result.modified
    assert text(gm) == [
        "bernoulli_default = ort_dynamo.bernoulli.default([2, 3], [3, 1], 0.75)",
        "_to_copy_default = aten._to_copy.default(bernoulli_default,)",
        "div_tensor = aten.div.Tensor(_to_copy_default, 0.75)",
        "mul_tensor = aten.mul.Tensor(x_1, div_tensor)",
    ]
    drawn = [n.name for n in gm.graph.nodes if n.meta.get(DRAWN)]
    assert drawn == ["bernoulli_default"]
    assert all(n.meta["recompute"] is CheckpointPolicy.MUST_SAVE for n in gm.graph.nodes if n.name in drawn)
    again = HoistRandom()(gm)
    assert again is not None
    assert not again.modified


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.native_dropout(x, 0.25, False),
        lambda x: aten.native_dropout(x, 0.0, True),
        lambda x: torch.multinomial(x, 1),
        lambda x: torch.bernoulli(x),
        lambda x: torch.normal(x, 1.0),
        lambda x: x + 1,
    ],
    ids=["evaluation", "probability 0", "multinomial", "bernoulli of data", "normal of data", "no draw"],
)
def test_what_does_not_draw_or_reads_data_stays(function: Callable[..., Any]) -> None:
    gm = trace(function, torch.rand(2, 3))
    before = text(gm)
    result = HoistRandom()(gm)
    assert result is not None
    assert not result.modified
    assert text(gm) == before


def test_a_draw_like_a_tensor_no_longer_reads_it() -> None:
    gm = trace(lambda x: torch.rand_like(x * 2), torch.ones(2, 3))
    HoistRandom()(gm)
    assert text(gm) == [
        "empty_strided_default = aten.empty_strided.default([2, 3], [3, 1])",
        "rand_like = aten.rand_like.default(empty_strided_default,)",
    ]


def test_symbolic_sizes_are_read_from_the_inputs() -> None:
    gm = make_fx(lambda x: torch.rand_like(x.repeat(2, 1)), tracing_mode="symbolic")(torch.ones(5, 3))
    HoistRandom()(gm)
    (empty,) = gm.graph.find_nodes(op="call_function", target=aten.empty_strided.default)
    assert aten.repeat.default not in {n.target for n in gm.graph.nodes}
    assert empty.all_input_nodes, "the size 2 * s0 was baked in"
    torch.manual_seed(0)
    drawn = gm(torch.ones(7, 3))
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(14, 3))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_dropout_draws_eagers_mask(layout: torch.memory_format, dynamic: bool) -> None:
    x = torch.randn(4, 3, 5, 6).to(memory_format=layout).requires_grad_()
    assert_like_eager(lambda x: F.dropout(F.dropout(x, 0.3), 0.6), x, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "view", [lambda x: x[:, None].expand(4, 3, 5), lambda x: x.as_strided((3, 3), (2, 1))], ids=["expanded", "overlaps"]
)
def test_dropout_of_a_view_that_repeats_entries_draws_one_for_each(view: Callable[..., Any], dynamic: bool) -> None:
    assert_like_eager(lambda x: F.dropout(view(x), 0.5), torch.randn(4, 5, requires_grad=True), dynamic=dynamic)


def test_draws_keep_eagers_order() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = F.dropout(x, 0.5)
        b = torch.rand(3)
        c = torch.multinomial(x.abs(), 2)
        d = torch.randn_like(a)
        e = torch.bernoulli(torch.sigmoid(a))
        return a, b, c, d + F.dropout(a, 0.2), e, torch.randperm(5)

    assert_like_eager(function, torch.rand(4, 8, requires_grad=True), allow_eager=True)


def test_what_is_drawn_over_is_drawn_all_the_same() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand_like(x).uniform_(2, 3) * x, torch.rand_like(x)

    assert_like_eager(twice, torch.randn(4, 3, requires_grad=True))


def test_of_a_checkpointed_dropout_the_mask_alone_is_kept(joint_graph: Callable[..., GraphModule]) -> None:
    def network(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: F.dropout(x.exp(), 0.5) @ w, x, use_reentrant=False).sum()

    gm = joint_graph(network, torch.randn(2, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True))
    tags = {n.name: n.meta["recompute"].name for n in gm.graph.nodes if "recompute" in n.meta}
    assert tags["bernoulli_default"] == "MUST_SAVE"
    rest = {tags[name] for name in ("exp", "_to_copy_default", "div_tensor", "mul_tensor", "mm")}
    assert rest == {"PREFER_RECOMPUTE"}


def test_a_checkpointed_draw_that_reads_data_is_kept(joint_graph: Callable[..., GraphModule]) -> None:
    def network(x: torch.Tensor) -> torch.Tensor:
        def draw(x: torch.Tensor) -> torch.Tensor:
            return x.exp() * torch.multinomial(x.sigmoid().detach(), 3, replacement=True)

        return checkpoint(draw, x, use_reentrant=False).sum()

    gm = joint_graph(network, torch.randn(2, 3, requires_grad=True))
    tags = {n.name: n.meta["recompute"].name for n in gm.graph.nodes if "recompute" in n.meta}
    assert tags["multinomial"] == "MUST_SAVE"
    assert tags["sigmoid"] == tags["exp"] == "PREFER_RECOMPUTE"


def test_memory_without_values_is_torchs_under_deterministic_algorithms() -> None:
    gm = trace(lambda x: aten.new_empty(x * 2, (4,)), torch.ones(2, 3))
    plain = HoistRandom()(gm)
    assert plain is not None
    assert not plain.modified
    HoistRandom(deterministic=True)(gm)
    assert "empty_strided_default = aten.empty_strided.default([4], [1])" in text(gm)
    again = HoistRandom(deterministic=True)(gm)
    assert again is not None
    assert not again.modified
