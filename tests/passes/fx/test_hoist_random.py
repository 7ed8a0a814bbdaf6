"""Random ops run on torch's generator in eager's order, and give eager's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.hoist_random import HoistRandom
from ort_dynamo.testing import assert_like_eager

aten = torch.ops.aten


def trace(function: Callable[..., Any], *args: torch.Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def test_dropout_becomes_a_random_mask_and_eagers_formula() -> None:
    assert_fx_rewrites(
        HoistRandom(),
        """
        x: f32[2, 3]
        native_dropout = aten.native_dropout.default(x, 0.25, True)
        getitem = native_dropout[0]  # f32[2, 3]
        getitem_1 = native_dropout[1]  # bool[2, 3]
        return getitem
        """,
        """
        x: f32[2, 3]
        bernoulli = ort_dynamo.bernoulli.default([2, 3], [3, 1], 0.75)  # bool[2, 3] | MUST_SAVE | random
        _to_copy = aten._to_copy.default(bernoulli, dtype=f32)  # f32[2, 3]
        div = aten.div.Tensor(_to_copy, 0.75)  # f32[2, 3]
        mul = aten.mul.Tensor(x, div)  # f32[2, 3]
        return mul
        """,
    )


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
    ids=["evaluation", "probability 0", "multinomial", "bernoulli of data", "normal of data", "not random"],
)
def test_deterministic_and_data_dependent_operators_are_not_hoisted(function: Callable[..., Any]) -> None:
    assert_fx_untouched(HoistRandom(), trace(function, torch.rand(2, 3)))


def test_rand_like_no_longer_reads_its_tensor() -> None:
    assert_fx_rewrites(
        HoistRandom(),
        """
        x: f32[2, 3]
        mul = aten.mul.Tensor(x, 2)  # f32[2, 3]
        rand_like = aten.rand_like.default(mul)  # f32[2, 3]
        return rand_like
        """,
        """
        x: f32[2, 3]
        empty_strided = aten.empty_strided.default([2, 3], [3, 1], dtype=f32)  # f32[2, 3] | MUST_SAVE | random
        rand_like = aten.rand_like.default(empty_strided)  # f32[2, 3] | MUST_SAVE | random
        return rand_like
        """,
    )


def test_symbolic_sizes_are_read_from_the_inputs() -> None:
    gm = make_fx(lambda x: torch.rand_like(x.repeat(2, 1)), tracing_mode="symbolic")(torch.ones(5, 3))
    drawn = "f32[2*s0, s1] | MUST_SAVE | random"
    assert_fx_rewrites(
        HoistRandom(),
        """
        x_1: f32[s0, s1]
        repeat = aten.repeat.default(x_1, [2, 1])  # f32[2*s0, s1]
        rand_like = aten.rand_like.default(repeat)  # f32[2*s0, s1]
        return rand_like
        """,
        f"""
        x_1: f32[s0, s1]
        sym_size = aten.sym_size.int(x_1, 0)  # s0
        mul = mul(2, sym_size)  # 2*s0
        sym_size_1 = aten.sym_size.int(x_1, 1)  # s1
        empty_strided = aten.empty_strided.default([mul, sym_size_1], [sym_size_1, 1], dtype=f32)  # {drawn}
        rand_like = aten.rand_like.default(empty_strided)  # {drawn}
        return rand_like
        """,
        gm,
        inputs=[torch.ones(7, 3)],
    )
    torch.manual_seed(0)
    found = gm(torch.ones(7, 3))
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(14, 3))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_dropout_has_eagers_mask(layout: torch.memory_format, dynamic: bool) -> None:
    x = torch.randn(4, 3, 5, 6).to(memory_format=layout).requires_grad_()
    assert_like_eager(lambda x: F.dropout(F.dropout(x, 0.3), 0.6), x, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "view", [lambda x: x[:, None].expand(4, 3, 5), lambda x: x.as_strided((3, 3), (2, 1))], ids=["expanded", "overlaps"]
)
def test_dropout_of_an_expanded_view_masks_each_element(view: Callable[..., Any], dynamic: bool) -> None:
    assert_like_eager(lambda x: F.dropout(view(x), 0.5), torch.randn(4, 5, requires_grad=True), dynamic=dynamic)


def test_random_operators_run_in_eagers_order() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = F.dropout(x, 0.5)
        b = torch.rand(3)
        c = torch.multinomial(x.abs(), 2)
        d = torch.randn_like(a)
        e = torch.bernoulli(torch.sigmoid(a))
        return a, b, c, d + F.dropout(a, 0.2), e, torch.randperm(5)

    assert_like_eager(function, torch.rand(4, 8, requires_grad=True), allow_eager=True)


def test_overwritten_random_tensor_still_advances_the_generator() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand_like(x).uniform_(2, 3) * x, torch.rand_like(x)

    assert_like_eager(twice, torch.randn(4, 3, requires_grad=True))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.randn_like(torch.rand(x.shape) + x),
        lambda x: torch.bernoulli(F.dropout(x.detach(), 0.5), 0.5),
        lambda x: torch.rand_like(torch.rand_like(torch.rand(x.shape).exp()).exp()),
        lambda x: x.detach().clone().uniform_().mul_(2).t().bernoulli_(0.5).t(),
    ],
    ids=["sum", "dropout", "several", "overwritten"],
)
def test_random_numbers_that_only_give_a_shape_still_advance_the_generator(draw: Callable[..., Any]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return draw(x) * x, torch.rand_like(x)

    assert_like_eager(function, torch.randn(4, 1, requires_grad=True))


def test_checkpointed_dropout_saves_only_its_mask(joint_graph: Callable[..., GraphModule]) -> None:
    def network(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: F.dropout(x.exp(), 0.5) @ w, x, use_reentrant=False).sum()

    gm = joint_graph(network, torch.randn(2, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True))
    tags = {n.name: n.meta["recompute"].name for n in gm.graph.nodes if "recompute" in n.meta}
    assert tags["bernoulli_default"] == "MUST_SAVE"
    rest = {tags[name] for name in ("exp", "_to_copy_default", "div_tensor", "mul_tensor", "mm")}
    assert rest == {"PREFER_RECOMPUTE"}


def test_checkpointed_data_dependent_random_operator_is_saved(joint_graph: Callable[..., GraphModule]) -> None:
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
    assert_fx_untouched(HoistRandom(), gm)
    assert_fx_rewrites(
        HoistRandom(deterministic=True),
        """
        x_1: f32[2, 3]
        mul = aten.mul.Tensor(x_1, 2)  # f32[2, 3]
        new_empty = aten.new_empty.default(mul, [4])  # f32[4]
        return new_empty
        """,
        """
        x_1: f32[2, 3]
        empty_strided = aten.empty_strided.default([4], [1], dtype=f32)  # f32[4] | MUST_SAVE | random
        return empty_strided
        """,
        gm,
        run=False,
    )
