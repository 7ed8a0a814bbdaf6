"""Attention without dropout loses its tag for random operators, and gets it back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from ort_dynamo.passes.fx.hide_seedless import HideSeedless
from ort_dynamo.passes.fx.restore_seedless import RestoreSeedless
from ort_dynamo.passes.running import run_passes

aten = torch.ops.aten


def attention(dropout: float) -> GraphModule:
    def function(q: Tensor) -> Tensor:
        result, _ = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
        return result.exp()

    gm = make_fx(function, tracing_mode="fake")(torch.randn(1, 2, 3, 4))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten._scaled_dot_product_flash_attention_for_cpu.default)
    node.args = (*node.args[:3], dropout)  # CPUs have the operator for no other dropout than 0
    return gm


def calls(gm: GraphModule) -> list[str]:
    return [
        f"{node.name} = {getattr(node.target, '__name__', node.target)}{node.args}"
        for node in gm.graph.nodes
        if node.op == "call_function"
    ]


def is_tagged(gm: GraphModule) -> bool:
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in gm.graph.nodes)


def test_a_function_without_the_tag_stands_in_until_the_operator_comes_back() -> None:
    gm, q = attention(0.0), torch.randn(1, 2, 3, 4)
    before, expected = calls(gm), gm(q)
    assert is_tagged(gm)
    records = run_passes([HideSeedless(), HideSeedless()], gm, check=True)
    assert [record.modified for record in records] == [True, False]
    attend, *others = before
    name, arguments = attend.split(" = ")[0], attend.partition("(")[2]
    assert calls(gm) == [f"{name} = untagged({arguments}", *others]
    assert not is_tagged(gm)
    assert_close(gm(q), expected)
    records = run_passes([RestoreSeedless(), RestoreSeedless()], gm, check=True)
    assert [record.modified for record in records] == [True, False]
    assert calls(gm) == before
    assert is_tagged(gm)


def test_attention_with_dropout_and_draws_keep_their_tag() -> None:
    for gm in (attention(0.5), make_fx(torch.bernoulli)(torch.rand(3))):
        before = calls(gm)
        (record,) = run_passes([HideSeedless()], gm, check=True)
        assert not record.modified
        assert calls(gm) == before
        assert is_tagged(gm)
