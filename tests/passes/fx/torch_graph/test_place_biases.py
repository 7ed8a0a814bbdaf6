"""Tests of where a matmul's bias is added, on a target that fuses kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.torch_graph.mark_chosen import choose
from ort_dynamo.passes.fx.torch_graph.place_biases import EPILOGUE, PlaceBiases
from ort_dynamo.testing import TOLERANCES

aten = torch.ops.aten

X, W, B = torch.randn(6, 4), torch.randn(4, 8), torch.randn(8)


def graph(function: Callable[..., Any]) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake")(X, W, B)
    choose(gm.graph.find_nodes(op="call_function", target=aten.sin.default), "for the test")
    return gm


TAKEN = {
    "pointwise": (
        """
        x: f32[6, 4]
        w: f32[4, 8]
        b: f32[8]
        addmm = aten.addmm.default(b, x, w)  # f32[6, 8]
        gelu = aten.gelu.default(addmm)  # f32[6, 8]
        return gelu
        """,
        """
        x: f32[6, 4]
        w: f32[4, 8]
        b: f32[8]
        mm = aten.mm.default(x, w)  # f32[6, 8]
        add = aten.add.Tensor(mm, b)  # f32[6, 8]
        gelu = aten.gelu.default(add)  # f32[6, 8]
        return gelu
        """,
    ),
    "behind a view": (
        """
        x: f32[6, 4]
        w: f32[4, 8]
        b: f32[8]
        addmm = aten.addmm.default(b, x, w)  # f32[6, 8]
        view = aten.view.default(addmm, [2, 3, 8])  # f32[2, 3, 8]
        gelu = aten.gelu.default(view)  # f32[2, 3, 8]
        return gelu
        """,
        """
        x: f32[6, 4]
        w: f32[4, 8]
        b: f32[8]
        mm = aten.mm.default(x, w)  # f32[6, 8]
        add = aten.add.Tensor(mm, b)  # f32[6, 8]
        view = aten.view.default(add, [2, 3, 8])  # f32[2, 3, 8]
        gelu = aten.gelu.default(view)  # f32[2, 3, 8]
        return gelu
        """,
    ),
    "a norm": (
        """
        x: f32[6, 4]
        w: f32[4, 8]
        b: f32[8]
        addmm = aten.addmm.default(b, x, w)  # f32[6, 8]
        native_layer_norm = aten.native_layer_norm.default(addmm, [8], None, None, 1e-05)
        getitem = native_layer_norm[0]  # f32[6, 8]
        getitem_1 = native_layer_norm[1]  # f32[6, 1]
        getitem_2 = native_layer_norm[2]  # f32[6, 1]
        return getitem
        """,
        """
        x: f32[6, 4]
        w: f32[4, 8]
        b: f32[8]
        mm = aten.mm.default(x, w)  # f32[6, 8]
        add = aten.add.Tensor(mm, b)  # f32[6, 8]
        native_layer_norm = aten.native_layer_norm.default(add, [8], None, None, 1e-05)
        getitem = native_layer_norm[0]  # f32[6, 8]
        getitem_1 = native_layer_norm[1]  # f32[6, 1]
        getitem_2 = native_layer_norm[2]  # f32[6, 1]
        return getitem
        """,
    ),
    "several": (
        """
        x: f32[6, 4]
        w: f32[4, 8]
        b: f32[8]
        addmm = aten.addmm.default(b, x, w)  # f32[6, 8]
        exp = aten.exp.default(addmm)  # f32[6, 8]
        sum = aten.sum.dim_IntList(addmm, [0])  # f32[8]
        return (exp, sum)
        """,
        """
        x: f32[6, 4]
        w: f32[4, 8]
        b: f32[8]
        mm = aten.mm.default(x, w)  # f32[6, 8]
        add = aten.add.Tensor(mm, b)  # f32[6, 8]
        exp = aten.exp.default(add)  # f32[6, 8]
        sum = aten.sum.dim_IntList(add, [0])  # f32[8]
        return (exp, sum)
        """,
    ),
}
"""The graph before and after."""


@pytest.mark.parametrize("name", TAKEN)
def test_it_goes_to_the_kernels_that_read(name: str) -> None:
    assert_fx_rewrites(PlaceBiases(True), *TAKEN[name], tolerance=TOLERANCES[torch.float32])


def test_it_is_torchs_where_only_torch_reads() -> None:
    gm = graph(lambda x, w, b: torch.addmm(b, x, w).view(2, 3, 8).sin())
    assert_fx_rewrites(
        PlaceBiases(True),
        """
        x_1: f32[6, 4]
        w_1: f32[4, 8]
        b_1: f32[8]
        addmm = aten.addmm.default(b_1, x_1, w_1)  # f32[6, 8]
        view = aten.view.default(addmm, [2, 3, 8])  # f32[2, 3, 8]
        sin = aten.sin.default(view)  # f32[2, 3, 8] | chosen='for the test'
        return sin
        """,
        f"""
        x_1: f32[6, 4]
        w_1: f32[4, 8]
        b_1: f32[8]
        addmm = aten.addmm.default(b_1, x_1, w_1)  # f32[6, 8] | chosen={EPILOGUE!r}
        view = aten.view.default(addmm, [2, 3, 8])  # f32[2, 3, 8]
        sin = aten.sin.default(view)  # f32[2, 3, 8] | chosen='for the test'
        return sin
        """,
        gm,
    )


STAYS = {
    "a product reads": lambda x, w, b: torch.addmm(b, x, w) @ w.t(),
    "a product and a kernel read": lambda x, w, b: ((y := torch.addmm(b, x, w)) @ w.t(), y.exp()),
    "it is returned": lambda x, w, b: torch.addmm(b, x, w),
    "torch and a kernel read": lambda x, w, b: ((y := torch.addmm(b, x, w)).sin(), y.exp()),
    "a matrix is added": lambda x, w, b: torch.addmm(b.expand(6, 8).contiguous(), x, w).exp(),
    "it is scaled": lambda x, w, b: torch.addmm(b, x, w, beta=2).exp(),
}


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    gm = graph(STAYS[name])
    assert_fx_untouched(PlaceBiases(True), gm)


def test_a_product_that_torch_runs_keeps_its_bias() -> None:
    gm = graph(lambda x, w, b: torch.addmm(b, x, w).exp())
    choose(gm.graph.find_nodes(op="call_function", target=aten.addmm.default), "for the test")
    assert_fx_untouched(PlaceBiases(True), gm)


def test_nothing_is_torchs_where_nothing_may_be() -> None:
    assert_fx_untouched(PlaceBiases(False), graph(lambda x, w, b: torch.addmm(b, x, w).sin()))
