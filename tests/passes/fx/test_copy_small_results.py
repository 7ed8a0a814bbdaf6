"""Tests of copying results of islands into torch's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.copy_small_results import CopySmallResults, owned
from ort_dynamo.segment.segment import segment


def outer(function: Callable[..., Any], eager: tuple[Any, ...] = ()) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake")(torch.ones(4, 4))

    def refuse(node: Node) -> str | None:
        return "on the list" if node.target in eager else None

    return segment(gm, refuse, torch.device("cpu")).gm


EVERY = CopySmallResults(slice(None))


def test_a_result_of_an_island_is_copied() -> None:
    gm = outer(lambda x: (x + 1, x * 2))
    assert_fx_rewrites(
        EVERY,
        """
        x_1: f32[4, 4]
        island_0 = island_0(x_1)
        getitem = island_0[0]  # f32[4, 4]
        getitem_1 = island_0[1]  # f32[4, 4]
        return (getitem, getitem_1)
        """,
        """
        x_1: f32[4, 4]
        island_0 = island_0(x_1)
        getitem = island_0[0]  # f32[4, 4]
        owned = owned(getitem)  # f32[4, 4]
        getitem_1 = island_0[1]  # f32[4, 4]
        owned_1 = owned(getitem_1)  # f32[4, 4]
        return (owned, owned_1)
        """,
        gm,
    )


def test_views_of_one_result_share_its_copy() -> None:
    gm = outer(lambda x: ((y := x + 1), y.t(), y[0]))
    assert_fx_rewrites(
        EVERY,
        """
        x_1: f32[4, 4]
        island_0 = island_0(x_1)
        getitem = island_0[0]  # f32[4, 4]
        t = aten.t.default(getitem)  # f32[4, 4] strides (1, 4)
        select = aten.select.int(getitem, 0, 0)  # f32[4]
        return (getitem, t, select)
        """,
        """
        x_1: f32[4, 4]
        island_0 = island_0(x_1)
        getitem = island_0[0]  # f32[4, 4]
        owned = owned(getitem)  # f32[4, 4]
        t = aten.t.default(owned)  # f32[4, 4] strides (1, 4)
        select = aten.select.int(owned, 0, 0)  # f32[4]
        return (owned, t, select)
        """,
        gm,
    )
    first, second, third = gm(torch.ones(4, 4))
    assert (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr() == third.untyped_storage().data_ptr()
    )


@pytest.mark.parametrize(
    ("function", "eager", "seen"),
    [
        (lambda x: (x + 1, x * 2), (), slice(0)),
        (lambda x: (x + 1).sin(), (torch.ops.aten.sin.default,), slice(None)),
        (lambda x: (x, x.t()), (), slice(None)),
    ],
    ids=["not seen", "made by torch", "an input and its view"],
)
def test_the_nearest_others_stay(function: Callable[[Tensor], Any], eager: tuple[Any, ...], seen: slice) -> None:
    gm = outer(lambda x: tuple(y) if isinstance(y := function(x), tuple) else (y,), eager)
    assert_fx_untouched(CopySmallResults(seen), gm)


def test_only_small_results_are_copied() -> None:
    small, large = torch.ones(4), torch.ones(1 << 15)
    assert owned(small) is not small
    assert torch.equal(owned(small), small)
    assert owned(large) is large
