"""Graphs are cut into islands: the nodes of each, and the values that cross."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.errors import FallbackRefusedError
from ort_dynamo.options.groups import SegmentOptions
from ort_dynamo.segment.segment import Segmented, check_fallback, segment

aten = torch.ops.aten
CPU = torch.device("cpu")


def cut(function: Callable[..., Any], *args: torch.Tensor, eager: tuple[Any, ...] = ()) -> Segmented:
    gm = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*(args or (torch.ones(4, 4),)))

    def refuse(node: Node) -> str | None:
        return "on the list" if node.target in eager else None

    return segment(gm, refuse, CPU)


def names(gm: GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes]


def outer(segmented: Segmented) -> list[str]:
    """List the calls of the outer graph, in order, without the getitem nodes of islands."""
    calls = [n for n in segmented.gm.graph.nodes if n.op in ("call_function", "call_module")]
    return [str(n.target) for n in calls if n.target is not operator.getitem]


def same_result(function: Callable[..., Any], segmented: Segmented, *args: torch.Tensor) -> None:
    ours, theirs = segmented.gm(*args), function(*args)
    torch.testing.assert_close(ours, theirs)


def test_a_graph_without_eager_nodes_is_one_island() -> None:
    segmented = cut(lambda x: (x + 1).exp() * 2)
    assert list(segmented.islands) == ["island_0"]
    assert names(segmented.islands["island_0"]) == ["x_1", "add", "exp", "mul", "output"]
    assert segmented.native.total() == 3
    assert not segmented.eager


def test_an_eager_node_stands_alone_between_two_islands() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a = x + 1
        return (a.sin() * 2).exp() + a * 3

    segmented = cut(function, eager=(aten.sin.default,))
    assert outer(segmented) == ["island_0", "aten.sin.default", "island_1"]
    (node,) = segmented.eager
    assert (node.target, node.reason) == ("aten.sin.default", "on the list")
    same_result(function, segmented, torch.randn(4, 4))


def test_islands_that_do_not_depend_on_an_eager_node_stay_whole() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        side = x.sin()
        main = x
        for _ in range(5):
            main = main * 2 + 1
        return main + side

    assert len(cut(function, eager=(aten.sin.default,)).islands) == 1


def test_an_assertion_on_an_islands_result_is_no_node_in_eager() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        torch._assert_async((doubled > 0).all(), "not positive")
        return doubled + 1

    segmented = cut(function)
    assert outer(segmented) == ["island_0", "aten._assert_async.msg"]
    assert not segmented.eager
    same_result(function, segmented, torch.ones(4, 4))
    with pytest.raises(RuntimeError, match="not positive"):
        segmented.gm(-torch.ones(4, 4))


def test_eager_nodes_in_a_row_open_no_island_between_them() -> None:
    segmented = cut(lambda x: (x + 1).sin().cos() + 1, eager=(aten.sin.default, aten.cos.default))
    assert len(segmented.islands) == 2
    assert len(segmented.eager) == 2


def test_views_at_the_boundary_are_made_outside() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y.t(), y.view(16)[3:], x.t()

    segmented = cut(function)
    assert names(segmented.islands["island_0"]) == ["x_1", "mul", "output"]
    same_result(function, segmented, torch.randn(4, 4))
    a, b, c = segmented.gm(x := torch.randn(4, 4))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert c.data_ptr() == x.data_ptr()


def test_a_graph_of_views_needs_no_island() -> None:
    segmented = cut(lambda x: x.t().unsqueeze(0)[:, 1:])
    assert not segmented.islands
    assert not segmented.eager


def test_a_view_that_two_islands_read_is_remade_in_each() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        v = (x + 1).t()
        return (v * 2).sin() + v

    segmented = cut(function, eager=(aten.sin.default,))
    assert "t" in names(segmented.islands["island_0"])
    assert "t" in names(segmented.islands["island_1"])
    same_result(function, segmented, torch.randn(4, 4))


def test_pieces_of_a_split_cross_as_views() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = (x * 2).split(2)
        return a, b + 1

    segmented = cut(function)
    same_result(function, segmented, torch.randn(4, 4))
    assert "aten.split.Tensor" in outer(segmented)


def test_random_operators_keep_their_order_across_levels() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        late = torch.bernoulli(x.exp().sigmoid())
        early = torch.bernoulli(x)
        return late, early

    segmented = cut(function, torch.rand(4, 4), eager=(aten.bernoulli.default,))
    x = torch.rand(4, 4)
    torch.manual_seed(0)
    ours = segmented.gm(x)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, function(x), rtol=0, atol=0)


def test_a_random_operator_that_reads_data_is_torchs_by_design() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli(x * 2) + torch.multinomial(x * 3, 4, replacement=True)

    segmented = cut(function, torch.rand(4, 4), eager=(aten.bernoulli.default, aten.multinomial.default))
    assert segmented.by_design == {"aten.bernoulli.default": 1, "aten.multinomial.default": 1}
    assert not segmented.eager


def test_a_random_operator_whose_lowering_refuses_it_keeps_the_reason() -> None:
    def attention(q: torch.Tensor) -> torch.Tensor:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.1)[0]

    fused = aten._scaled_dot_product_flash_attention_for_cpu.default
    (node,) = cut(attention, torch.rand(1, 2, 3, 4), eager=(fused,)).eager
    assert node.reason == "on the list"


def test_a_node_on_the_meta_device_has_the_reason_that_it_holds_no_data() -> None:
    segmented = cut(lambda x: x + 1, torch.ones(2, device="meta"))
    assert "meta, which holds no data" in str(segmented.eager)


def test_nodes_on_another_device_stay_in_eager() -> None:
    segmented = cut(lambda x, y: (x + 1, y + 1), torch.ones(2), torch.ones(2, device="meta"))
    (node,) = segmented.eager
    assert "a tensor on meta" in node.reason


def test_fallback_error_lists_the_nodes() -> None:
    segmented = cut(lambda x: x.sin() + 1, eager=(aten.sin.default,))
    check_fallback(segmented, SegmentOptions(), "forward")
    with pytest.raises(FallbackRefusedError, match=r"1 node\(s\) of the forward graph.*\n.*aten.sin.default: on the"):
        check_fallback(segmented, SegmentOptions(fallback="error"), "forward")


def test_constant_tensors_are_handed_to_the_island() -> None:
    constant = torch.randn(4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + constant

    segmented = cut(function)
    same_result(function, segmented, torch.randn(4, 4))


def padded_and_folded(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.pad(x.exp(), (0, 3))
    z = y.sin().reshape(2, y.shape[1] // 2, -1) if y.shape[1] % 2 == 0 else y.cos()
    return z * torch.arange(y.shape[-1]).sum() / y.shape[0]


def test_a_size_that_follows_from_those_of_the_inputs_ends_no_island() -> None:
    gm = make_fx(padded_and_folded, tracing_mode="symbolic")(torch.ones(4, 5))
    reads = [n for n in gm.graph.nodes if n.target is aten.sym_size.int and n.args[0].op != "placeholder"]
    assert reads
    segmented = segment(gm, lambda node: None, CPU)
    assert list(segmented.islands) == ["island_0"]
    for shape in ((4, 5), (6, 9)):
        x = torch.randn(shape)
        same_result(padded_and_folded, segmented, x)


def test_a_size_that_depends_on_data_is_read_from_the_tensor_that_has_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        kept = x[x > 0].exp()
        return kept * torch.arange(kept.shape[0]).sum()

    gm = make_fx(function, tracing_mode="symbolic")(torch.ones(4))
    eager = (aten.nonzero.default, aten.index.Tensor)
    segmented = segment(gm, lambda node: "on the list" if node.target in eager else None, CPU)
    same_result(function, segmented, torch.tensor([1.0, -2.0, 3.0, 4.0]))
    assert len(segmented.islands) == 2
