"""A view becomes an earlier equal view; views that differ in size, strides or owner stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.merge_views import MergeViews

X = torch.randn(2, 3, 4)


def traced(function: Callable[..., Any], mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(X)


VIEWS = {
    "transposed twice": (
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        transpose = aten.transpose.int(exp, 0, 1)  # f32[3, 2, 4] strides (4, 12, 1)
        transpose_1 = aten.transpose.int(transpose, 0, 1)  # f32[2, 3, 4]
        return transpose_1
        """,
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        return exp
        """,
    ),
    "permuted": (
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        permute = aten.permute.default(exp, [2, 0, 1])  # f32[4, 2, 3] strides (1, 12, 4)
        permute_1 = aten.permute.default(permute, [1, 2, 0])  # f32[2, 3, 4]
        mul = aten.mul.Tensor(permute_1, 2)  # f32[2, 3, 4]
        return mul
        """,
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        mul = aten.mul.Tensor(exp, 2)  # f32[2, 3, 4]
        return mul
        """,
    ),
    "expanded by nothing": (
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        expand = aten.expand.default(exp, [2, 3, 4])  # f32[2, 3, 4]
        view = aten.view.default(expand, [6, 4])  # f32[6, 4]
        return view
        """,
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        view = aten.view.default(exp, [6, 4])  # f32[6, 4]
        return view
        """,
    ),
    "equal": (
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        view = aten.view.default(exp, [6, 4])  # f32[6, 4]
        view_1 = aten.view.default(exp, [-1, 4])  # f32[6, 4]
        t = aten.t.default(view_1)  # f32[4, 6] strides (1, 4)
        mm = aten.mm.default(view, t)  # f32[6, 6]
        return mm
        """,
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        view = aten.view.default(exp, [6, 4])  # f32[6, 4]
        t = aten.t.default(view)  # f32[4, 6] strides (1, 4)
        mm = aten.mm.default(view, t)  # f32[6, 6]
        return mm
        """,
    ),
    "of an input": (
        """
        x: f32[2, 3, 4]
        view = aten.view.default(x, [6, 4])  # f32[6, 4]
        t = aten.t.default(view)  # f32[4, 6] strides (1, 4)
        view_1 = aten.view.default(x, [6, 4])  # f32[6, 4]
        mm = aten.mm.default(t, view_1)  # f32[4, 4]
        return mm
        """,
        """
        x: f32[2, 3, 4]
        view = aten.view.default(x, [6, 4])  # f32[6, 4]
        t = aten.t.default(view)  # f32[4, 6] strides (1, 4)
        mm = aten.mm.default(t, view)  # f32[4, 4]
        return mm
        """,
    ),
    "a view of a view": (
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        view = aten.view.default(exp, [2, 12])  # f32[2, 12]
        view_1 = aten.view.default(view, [6, 4])  # f32[6, 4]
        mul = aten.mul.Tensor(view_1, 2)  # f32[6, 4]
        return mul
        """,
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        view = aten.view.default(exp, [6, 4])  # f32[6, 4]
        mul = aten.mul.Tensor(view, 2)  # f32[6, 4]
        return mul
        """,
    ),
    "a part": (
        """
        x: f32[2, 3, 4]
        slice = aten.slice.Tensor(x, 0, 1, 9223372036854775807)  # f32[1, 3, 4]
        sum = aten.sum.default(slice)  # f32[]
        slice_1 = aten.slice.Tensor(x, 0, 1, 9223372036854775807)  # f32[1, 3, 4]
        exp = aten.exp.default(slice_1)  # f32[1, 3, 4]
        mul = aten.mul.Tensor(sum, exp)  # f32[1, 3, 4]
        return mul
        """,
        """
        x: f32[2, 3, 4]
        slice = aten.slice.Tensor(x, 0, 1, 9223372036854775807)  # f32[1, 3, 4]
        sum = aten.sum.default(slice)  # f32[]
        exp = aten.exp.default(slice)  # f32[1, 3, 4]
        mul = aten.mul.Tensor(sum, exp)  # f32[1, 3, 4]
        return mul
        """,
    ),
    "an output that begins at an input": (
        """
        x: f32[2, 3, 4]
        transpose = aten.transpose.int(x, 0, 1)  # f32[3, 2, 4] strides (4, 12, 1)
        transpose_1 = aten.transpose.int(transpose, 0, 1)  # f32[2, 3, 4]
        view = aten.view.default(transpose_1, [6, 4])  # f32[6, 4]
        return view
        """,
        """
        x: f32[2, 3, 4]
        view = aten.view.default(x, [6, 4])  # f32[6, 4]
        return view
        """,
    ),
}
"""The graph before and after."""


@pytest.mark.parametrize("name", VIEWS)
def test_a_chain_of_views_becomes_one_equal_view(name: str) -> None:
    assert_fx_rewrites(MergeViews(), *VIEWS[name])


def test_symbolic_sizes_are_compared_as_expressions() -> None:
    def function(x: Tensor) -> Tensor:
        return x.exp().view(-1, 4).view(x.shape[0], x.shape[1], 4).transpose(0, 1).transpose(1, 0)

    gm = traced(function, "symbolic")
    assert_fx_rewrites(
        MergeViews(),
        """
        x_1: f32[s0, s1, 4]
        exp = aten.exp.default(x_1)  # f32[s0, s1, 4]
        view = aten.view.default(exp, [-1, 4])  # f32[s0*s1, 4]
        sym_size = aten.sym_size.int(x_1, 0)  # s0
        sym_size_1 = aten.sym_size.int(x_1, 1)  # s1
        view_1 = aten.view.default(view, [sym_size, sym_size_1, 4])  # f32[s0, s1, 4]
        transpose = aten.transpose.int(view_1, 0, 1)  # f32[s1, s0, 4] strides (4, 4*s1, 1)
        transpose_1 = aten.transpose.int(transpose, 1, 0)  # f32[s0, s1, 4]
        return transpose_1
        """,
        """
        x_1: f32[s0, s1, 4]
        exp = aten.exp.default(x_1)  # f32[s0, s1, 4]
        sym_size = aten.sym_size.int(x_1, 0)  # s0
        sym_size_1 = aten.sym_size.int(x_1, 1)  # s1
        return exp
        """,
        gm,
        inputs=[X],
    )


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
    assert_fx_untouched(MergeViews(), traced(function))


def test_a_view_of_an_input_that_is_written_to_stays() -> None:
    def function(x: Tensor) -> Tensor:
        before = x.view(6, 4).sum()
        x.copy_(x.exp())
        return before * x.view(6, 4)

    assert_fx_untouched(MergeViews(), traced(function))


VIEWED_TWICE = """
    x: f32[2, 3, 4]
    exp = aten.exp.default(x)  # f32[2, 3, 4] | MUST_RECOMPUTE
    view = aten.view.default(exp, [2, 12])  # f32[2, 12]
    view_1 = aten.view.default(view, [6, 4])  # f32[6, 4]
    return view_1
"""


def test_views_of_a_recomputed_tensor_are_not_merged() -> None:
    assert_fx_untouched(MergeViews(), VIEWED_TWICE)
    assert_fx_rewrites(
        MergeViews(),
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        view = aten.view.default(exp, [2, 12])  # f32[2, 12]
        view_1 = aten.view.default(view, [6, 4])  # f32[6, 4]
        return view_1
        """,
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        view = aten.view.default(exp, [6, 4])  # f32[6, 4]
        return view
        """,
    )


KEPT_AND_RECOMPUTED = """
    x: f32[2, 3, 4]
    exp = aten.exp.default(x)  # f32[2, 3, 4]
    view = aten.view.default(exp, [6, 4])  # f32[6, 4]{first}
    sum = aten.sum.default(view)  # f32[]
    view_1 = aten.view.default(exp, [6, 4])  # f32[6, 4]{second}
    mul = aten.mul.Tensor(sum, view_1)  # f32[6, 4]
    return mul
"""


@pytest.mark.parametrize(("first", "second"), [(" | MUST_RECOMPUTE", ""), ("", " | MUST_RECOMPUTE")])
def test_a_recomputed_view_is_not_merged_with_a_saved_one(first: str, second: str) -> None:
    assert_fx_untouched(MergeViews(), KEPT_AND_RECOMPUTED.format(first=first, second=second))


def test_two_recomputed_views_are_merged() -> None:
    assert_fx_rewrites(
        MergeViews(),
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        view = aten.view.default(exp, [6, 4])  # f32[6, 4] | MUST_RECOMPUTE
        sum = aten.sum.default(view)  # f32[]
        view_1 = aten.view.default(exp, [6, 4])  # f32[6, 4] | MUST_RECOMPUTE
        mul = aten.mul.Tensor(sum, view_1)  # f32[6, 4]
        return mul
        """,
        """
        x: f32[2, 3, 4]
        exp = aten.exp.default(x)  # f32[2, 3, 4]
        view = aten.view.default(exp, [6, 4])  # f32[6, 4] | MUST_RECOMPUTE
        sum = aten.sum.default(view)  # f32[]
        mul = aten.mul.Tensor(sum, view)  # f32[6, 4]
        return mul
        """,
    )
