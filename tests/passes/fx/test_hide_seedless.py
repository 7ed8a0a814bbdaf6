"""Attention without dropout loses its tag for random operators, and gets it back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites, assert_fx_untouched
from ort_dynamo.passes.fx.hide_seedless import HideSeedless
from ort_dynamo.passes.fx.restore_seedless import RestoreSeedless

aten = torch.ops.aten

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def attention(dropout: float) -> GraphModule:
    def function(q: Tensor) -> Tensor:
        result, _ = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
        return result.exp()

    gm = make_fx(function, tracing_mode="fake")(torch.randn(1, 2, 3, 4))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default)
    node.args = (*node.args[:3], dropout)  # CPUs have the operator for no other dropout than 0
    return gm


def is_tagged(gm: GraphModule) -> bool:
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in gm.graph.nodes)


def test_a_function_without_the_tag_stands_in_until_the_operator_comes_back() -> None:
    gm = attention(0.0)
    assert is_tagged(gm)
    assert_fx_rewrites(
        HideSeedless(),
        f"""
        q_1: f32[1, 2, 3, 4]
        {ATTENTION} = aten.{ATTENTION}.default(q_1, q_1, q_1, 0.0)
        getitem = {ATTENTION}[0]  # f32[1, 2, 3, 4]
        getitem_1 = {ATTENTION}[1]  # f32[1, 2, 3] strides (6, 1, 2)
        exp = aten.exp.default(getitem)  # f32[1, 2, 3, 4]
        return exp
        """,
        """
        q_1: f32[1, 2, 3, 4]
        untagged = untagged(q_1, q_1, q_1, 0.0)
        getitem = untagged[0]  # f32[1, 2, 3, 4]
        getitem_1 = untagged[1]  # f32[1, 2, 3] strides (6, 1, 2)
        exp = aten.exp.default(getitem)  # f32[1, 2, 3, 4]
        return exp
        """,
        gm,
    )
    assert not is_tagged(gm)
    assert_fx_rewrites(
        RestoreSeedless(),
        """
        q_1: f32[1, 2, 3, 4]
        untagged = untagged(q_1, q_1, q_1, 0.0)
        getitem = untagged[0]  # f32[1, 2, 3, 4]
        getitem_1 = untagged[1]  # f32[1, 2, 3] strides (6, 1, 2)
        exp = aten.exp.default(getitem)  # f32[1, 2, 3, 4]
        return exp
        """,
        f"""
        q_1: f32[1, 2, 3, 4]
        {ATTENTION} = aten.{ATTENTION}.default(q_1, q_1, q_1, 0.0)
        getitem = {ATTENTION}[0]  # f32[1, 2, 3, 4]
        getitem_1 = {ATTENTION}[1]  # f32[1, 2, 3] strides (6, 1, 2)
        exp = aten.exp.default(getitem)  # f32[1, 2, 3, 4]
        return exp
        """,
        gm,
    )
    assert is_tagged(gm)


def test_attention_with_dropout_and_random_operators_keep_their_tag() -> None:
    for gm in (attention(0.5), make_fx(torch.bernoulli, tracing_mode="fake")(torch.rand(3))):
        assert_fx_untouched(HideSeedless(), gm)
        assert is_tagged(gm)
