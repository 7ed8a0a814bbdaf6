"""Where the bias of a matmul is added on a target that fuses kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_twice import run_twice
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.marks import CHOSEN
from ort_dynamo.passes.fx.torch_graph.choice import choose
from ort_dynamo.passes.fx.torch_graph.place_biases import EPILOGUE, PlaceBiases

aten = torch.ops.aten

X, W, B = torch.randn(6, 4), torch.randn(4, 8), torch.randn(8)


def graph(function: Callable[..., Any]) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake")(X, W, B)
    choose(gm.graph.find_nodes(op="call_function", target=aten.sin.default), "for the test")
    return gm


def count(gm: GraphModule, target: Any) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=target))


READ = {
    "pointwise": lambda x, w, b: F.gelu(torch.addmm(b, x, w)),
    "behind a view": lambda x, w, b: F.gelu(torch.addmm(b, x, w).view(2, 3, 8)),
    "a norm": lambda x, w, b: F.layer_norm(torch.addmm(b, x, w), (8,)),
    "several": lambda x, w, b: ((y := torch.addmm(b, x, w)).exp(), y.sum(0)),
}


@pytest.mark.parametrize("name", READ)
def test_it_goes_to_the_kernels_that_read(name: str) -> None:
    gm = graph(READ[name])
    assert run_twice(PlaceBiases(True), gm)
    assert (count(gm, aten.addmm.default), count(gm, aten.mm.default)) == (0, 1)
    torch.testing.assert_close(gm(X, W, B), READ[name](X, W, B))


def test_it_is_torchs_where_only_torch_reads() -> None:
    gm = graph(lambda x, w, b: torch.addmm(b, x, w).view(2, 3, 8).sin())
    assert run_twice(PlaceBiases(True), gm)
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert node.meta[CHOSEN] == EPILOGUE


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
    assert not run_twice(PlaceBiases(True), gm)


def test_nothing_is_torchs_where_nothing_may_be() -> None:
    assert not run_twice(PlaceBiases(False), graph(lambda x, w, b: torch.addmm(b, x, w).sin()))
