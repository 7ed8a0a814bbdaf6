"""Tests of sinking recomputed nodes into the island that reads them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.segment.segment import Segmented, segment

aten = torch.ops.aten


def cut(function: Callable[..., Any], *args: Tensor, fused: bool = True) -> Segmented:
    """Cut where a function calls sine, which torch runs; the results stay the same."""
    gm = make_fx(function, tracing_mode="fake")(*args)

    def refuse(node: Node) -> str | None:
        return "on the list" if node.target is aten.sin.default else None

    segmented = segment(gm, refuse, torch.device("cpu"), fused=fused)
    torch.testing.assert_close(segmented.gm(*args), function(*args))
    return segmented


def calls(segmented: Segmented, island: str) -> list[str]:
    nodes = segmented.islands[island].graph.find_nodes
    return [n.name for n in nodes(op="call_function", target=aten.exp.default)] + [
        n.name for n in nodes(op="call_function", target=aten.sum.default)
    ]


def recomputed(x: Tensor, grad: Tensor) -> Tensor:
    again = x.exp()
    return (grad * 2).sin() * again


X, GRAD = torch.randn(4, 4), torch.randn(4, 4)


def test_it_moves_to_its_reader() -> None:
    segmented = cut(recomputed, X, GRAD)
    assert calls(segmented, "island_0") == []
    assert calls(segmented, "island_1") == ["exp"]
    assert calls(cut(recomputed, X, GRAD, fused=False), "island_0") == ["exp"]


def test_a_chain_sinks_to_the_first_of_its_readers() -> None:
    def function(x: Tensor, grad: Tensor) -> Tensor:
        again = (x + 1).exp()
        first = (grad * 2).sin() * again
        return (first * 2).sin() * again

    segmented = cut(function, X, GRAD)
    assert calls(segmented, "island_1") == ["exp"]
    assert not segmented.islands["island_0"].graph.find_nodes(op="call_function", target=aten.add.Tensor)


def test_a_chain_through_wider_values_sinks() -> None:
    def function(x: Tensor, grad: Tensor) -> Tensor:
        return (grad * 2).sin() * x.float().exp().bfloat16()

    segmented = cut(function, X.bfloat16(), GRAD)
    assert calls(segmented, "island_0") == []
    assert calls(segmented, "island_1") == ["exp"]
    wide = cut(lambda x, g: (g * 2).sin() * x.double().exp().bfloat16(), X, GRAD)
    assert calls(wide, "island_0") == ["exp"]


def test_a_value_stays_where_an_earlier_island_reads_a_larger_one() -> None:
    def function(x: Tensor, grad: Tensor) -> Tensor:
        wide = x.float().exp()
        return (grad * wide).sin() * wide.bfloat16()

    segmented = cut(function, X.bfloat16(), GRAD)
    assert calls(segmented, "island_0") == ["exp"]
    (read,) = (n for n in segmented.gm.graph.nodes if n.op == "call_module" and n.target == "island_1")
    assert torch.bfloat16 in {one.meta["val"].dtype for one in read.all_input_nodes}


def test_tensors_that_torch_reads_outputs_and_reductions_stay() -> None:
    assert calls(cut(lambda x, g: (g * 2).sin() * x.exp().sin(), X, GRAD), "island_0") == ["exp"]
    assert calls(cut(lambda x, g: ((g * 2).sin() * (y := x.exp()), y), X, GRAD), "island_0") == ["exp"]
    assert calls(cut(lambda x, g: (g * 2).sin() * x.sum(), X, GRAD), "island_0") == ["sum_1"]


def test_a_parameter_lives_anyway() -> None:
    gm = make_fx(lambda x, g: (g * 2).sin() * x.sum(), tracing_mode="fake")(X, GRAD)
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), ("primals_1", "tangents_1"), strict=True):
        node.target = name
    segmented = segment(gm, lambda n: "sine" if n.target is aten.sin.default else None, torch.device("cpu"), fused=True)
    assert calls(segmented, "island_1") == ["sum_1"]


def test_a_write_keeps_all_in_place() -> None:
    def function(x: Tensor, grad: Tensor) -> Tensor:
        result = (grad * 2).sin() * x.exp()
        x.copy_(grad)
        return result

    gm = make_fx(function, tracing_mode="fake")(X.clone(), GRAD)
    segmented = segment(gm, lambda n: "sine" if n.target is aten.sin.default else None, torch.device("cpu"), fused=True)
    x = X.clone()
    torch.testing.assert_close(segmented.gm(x, GRAD), (GRAD * 2).sin() * X.exp())
    assert torch.equal(x, GRAD)
    assert [n for n in segmented.gm.graph.nodes if n.target is operator.getitem]
