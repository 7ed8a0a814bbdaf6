"""A sum keeps no dimension that a view drops; sums that others read, too, stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.drop_unit_dims import DropUnitDims

aten = torch.ops.aten
X = torch.randn(2, 3, 4)

DROPPED = {
    "leading": (
        """
        x: f32[2, 3, 4]
        sum = aten.sum.dim_IntList(x, [0, 1], True)  # f32[1, 1, 4]
        view = aten.view.default(sum, [4])  # f32[4]
        return view
        """,
        """
        x: f32[2, 3, 4]
        sum = aten.sum.dim_IntList(x, [0, 1], False)  # f32[4]
        return sum
        """,
    ),
    "squeezed": (
        """
        x: f32[2, 3, 4]
        sum = aten.sum.dim_IntList(x, [-1], True)  # f32[2, 3, 1]
        squeeze = aten.squeeze.dim(sum, -1)  # f32[2, 3]
        mul = aten.mul.Tensor(squeeze, 2)  # f32[2, 3]
        return mul
        """,
        """
        x: f32[2, 3, 4]
        sum = aten.sum.dim_IntList(x, [-1], False)  # f32[2, 3]
        mul = aten.mul.Tensor(sum, 2)  # f32[2, 3]
        return mul
        """,
    ),
    "all": (
        """
        x: f32[2, 3, 4]
        sum = aten.sum.dim_IntList(x, [], True)  # f32[1, 1, 1]
        view = aten.view.default(sum, [])  # f32[]
        return view
        """,
        """
        x: f32[2, 3, 4]
        sum = aten.sum.dim_IntList(x, [], False)  # f32[]
        return sum
        """,
    ),
}
"""The graph before and after."""


@pytest.mark.parametrize("name", DROPPED)
def test_dimensions_that_a_view_drops_are_dropped_by_the_reduction(name: str) -> None:
    assert_fx_rewrites(DropUnitDims(), *DROPPED[name])


def test_symbolic_dimensions_that_a_view_drops_are_dropped_by_the_reduction() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sum([1], keepdim=True).view(x.shape[0], x.shape[2]).t()

    gm = make_fx(function, tracing_mode="symbolic")(X)
    given = torch.randn(5, 6, 4)
    assert_fx_rewrites(
        DropUnitDims(),
        """
        x_1: f32[s0, s1, s2]
        sum = aten.sum.dim_IntList(x_1, [1], True)  # f32[s0, 1, s2]
        sym_size = aten.sym_size.int(x_1, 0)  # s0
        sym_size_1 = aten.sym_size.int(x_1, 2)  # s2
        view = aten.view.default(sum, [sym_size, sym_size_1])  # f32[s0, s2]
        t = aten.t.default(view)  # f32[s2, s0] strides (1, s2)
        return t
        """,
        """
        x_1: f32[s0, s1, s2]
        sum = aten.sum.dim_IntList(x_1, [1], False)  # f32[s0, s2]
        sym_size = aten.sym_size.int(x_1, 0)  # s0
        sym_size_1 = aten.sym_size.int(x_1, 2)  # s2
        t = aten.t.default(sum)  # f32[s2, s0] strides (1, s2)
        return t
        """,
        gm,
        inputs=[given],
    )
    assert gm(given).shape == (4, 5)


def test_all_views_that_read_a_sum_become_it() -> None:
    def twice(x: Tensor) -> Tensor:
        y = x.sum([0], keepdim=True)
        return y.view(y.shape[1], y.shape[2]) * y.squeeze(0)

    gm = make_fx(twice, tracing_mode="symbolic")(X)
    assert_fx_rewrites(
        DropUnitDims(),
        """
        x_1: f32[s0, s1, s2]
        sum = aten.sum.dim_IntList(x_1, [0], True)  # f32[1, s1, s2]
        sym_size = aten.sym_size.int(x_1, 1)  # s1
        sym_size_1 = aten.sym_size.int(x_1, 2)  # s2
        view = aten.view.default(sum, [sym_size, sym_size_1])  # f32[s1, s2]
        squeeze = aten.squeeze.dim(sum, 0)  # f32[s1, s2]
        mul = aten.mul.Tensor(view, squeeze)  # f32[s1, s2]
        return mul
        """,
        """
        x_1: f32[s0, s1, s2]
        sum = aten.sum.dim_IntList(x_1, [0], False)  # f32[s1, s2]
        sym_size = aten.sym_size.int(x_1, 1)  # s1
        sym_size_1 = aten.sym_size.int(x_1, 2)  # s2
        mul = aten.mul.Tensor(sum, sum)  # f32[s1, s2]
        return mul
        """,
        gm,
        inputs=[torch.randn(5, 6, 4)],
    )


RECOMPUTED = """
    x: f32[2, 3]
    sum = aten.sum.dim_IntList(x, [0], True)  # f32[1, 3] | MUST_RECOMPUTE
    squeeze = aten.squeeze.dim(sum, 0)  # f32[3]
    mul = aten.mul.Tensor(squeeze, 2)  # f32[3]
    return mul
"""


def test_a_recomputed_sum_does_not_replace_a_saved_view() -> None:
    assert_fx_untouched(DropUnitDims(), RECOMPUTED)
    assert_fx_rewrites(
        DropUnitDims(),
        """
        x: f32[2, 3]
        sum = aten.sum.dim_IntList(x, [0], True)  # f32[1, 3]
        squeeze = aten.squeeze.dim(sum, 0)  # f32[3]
        mul = aten.mul.Tensor(squeeze, 2)  # f32[3]
        return mul
        """,
        """
        x: f32[2, 3]
        sum = aten.sum.dim_IntList(x, [0], False)  # f32[3]
        mul = aten.mul.Tensor(sum, 2)  # f32[3]
        return mul
        """,
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum([0], keepdim=True) * x,
        lambda x: x.sum([0], keepdim=True),
        lambda x: x.sum([0], keepdim=True).view(x.shape[2], x.shape[1]),
        lambda x: x.sum([0]).view(x.shape[1], x.shape[2]),
        lambda x: (y := x.sum([0], keepdim=True)).squeeze(0) * y.exp(),
    ],
    ids=["arithmetic", "the output", "other sizes", "already dropped", "another reader"],
)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_the_nearest_other_sums_stay(function: Callable[..., Any], mode: str) -> None:
    assert_fx_untouched(DropUnitDims(), make_fx(function, tracing_mode=mode)(X))
