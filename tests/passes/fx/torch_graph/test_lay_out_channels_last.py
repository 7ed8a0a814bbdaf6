"""Layouts before and after; what torch really gives has the strides that the graph says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_twice import run_twice
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.marks import CHOSEN, HALF
from ort_dynamo.passes.fx.torch_graph.lay_out_channels_last import LayOutChannelsLast
from ort_dynamo.testing import assert_close


def strides(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # Of a dimension of one element any stride is right.
        return tuple(stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)
    return [strides(one) for one in value] if isinstance(value, (tuple, list)) else value


class _Checked(Interpreter):
    """Runs a graph and compares each result's strides with its fake value's."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and not _is_free(n) and result is not None:
            assert strides(result) == strides(n.meta["val"]), n.format_node()
        return result


def _is_free(node: Node) -> bool:
    """Whether the strides are the kernel's choice, and are made what the graph says by the node that follows."""
    backward = torch.ops.aten.convolution_backward.default
    return node.target is backward or (bool(node.all_input_nodes) and node.all_input_nodes[0].target is backward)


def laid_out(
    function: Callable[..., Any], *inputs: torch.Tensor, chosen: bool = True, mode: str = "fake"
) -> tuple[GraphModule, bool]:
    """The graph of `function`, all torch's, after the pass; it must compute the same, in the same strides."""
    gm = make_fx(function, tracing_mode=mode)(*inputs)
    for node in gm.graph.nodes:
        if node.op == "call_function" and (chosen or "relu" not in node.name):
            node.meta[CHOSEN] = "test"
    modified = run_twice(LayOutChannelsLast(), gm)
    expected, actual = function(*inputs), _Checked(gm).run(*inputs)
    for index, (mine, theirs) in enumerate(zip(_leaves(actual), _leaves(expected), strict=True)):
        assert_close(mine, theirs, f"output {index}")
    return gm, modified


def _leaves(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [one for one in value if one is not None]


def names(gm: GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "call_function"]


torch.manual_seed(0)
IMAGES, WEIGHT = torch.randn(2, 8, 12, 12), torch.randn(8, 8, 3, 3)


def conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, padding=1)


def test_what_follows_a_convolution_follows_its_layout_to_the_output() -> None:
    gm, modified = laid_out(lambda x, w: conv(x, w).relu() + 1, IMAGES, WEIGHT)
    assert modified
    assert names(gm) == ["clone_default", "convolution", "relu", "add", "clone_default_1"]
    layouts = {node.name: node.meta["val"] for node in gm.graph.nodes if node.op == "call_function"}
    for name in ("clone_default", "convolution", "relu", "add"):
        assert layouts[name].is_contiguous(memory_format=torch.channels_last), name
    assert layouts["clone_default_1"].is_contiguous()


def test_two_convolutions_of_one_tensor_share_its_copy() -> None:
    gm, _ = laid_out(lambda x, w: conv(conv(x, w), w) + conv(x, w), IMAGES, WEIGHT)
    assert names(gm).count("clone_default") == 1
    assert sum("clone" in name for name in names(gm)) == 2  # of the input, and of the output


def test_an_operator_that_is_not_known_reads_what_it_was_traced_with() -> None:
    gm, _ = laid_out(lambda x, w: (conv(x, w).view(2, -1).cumsum(1), conv(x, w).relu()), IMAGES, WEIGHT)
    (view,) = (node for node in gm.graph.nodes if node.target is torch.ops.aten.view.default)
    assert view.args[0].meta["val"].is_contiguous()


def test_views_of_a_layout_are_views_in_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        both = torch.cat([conv(x, w), x], 1)
        return conv(both[:, :8].detach(), w), both[:, 8:].cumsum(1)

    gm, modified = laid_out(function, IMAGES, WEIGHT)
    assert modified
    assert sum(node.target is torch.ops.aten.slice.Tensor for node in gm.graph.nodes) >= 2


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.max_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, 3),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.pad(x, (1, 1, 0, 2)),
        lambda x: x * torch.arange(8.0).view(8, 1, 1),
        lambda x: x.mean((2, 3), keepdim=True) * x,
        lambda x: torch.where(x > 0, x, x.exp()),
        lambda x: torch.ops.aten.hardtanh_backward(x, x + 1, 0, 6),
        lambda x: torch.ops.aten.hardswish_backward(x, x + 1),
        lambda x: torch.ops.aten.elu_backward(x, 1, 1, 1, False, x + 1),
        lambda x: torch.ops.aten.leaky_relu_backward(x, x + 1, 0.1, False),
        lambda x: x.softmax(1),
        lambda x: x.transpose(2, 3),
        lambda x: F.pixel_shuffle(x, 2).repeat(1, 4, 1, 1),
        lambda x: F.group_norm(x, 2),
        lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2),
        lambda x: (x.permute(0, 2, 3, 1) * torch.arange(8.0)).sigmoid().permute(0, 3, 1, 2),
        lambda x: x.permute(0, 2, 3, 1).contiguous().view(-1, 8).softmax(1).view(2, 12, 12, 8).permute(0, 3, 1, 2),
        lambda x: x.permute(0, 2, 3, 1).flatten(1).cumsum(1).view(2, 12, 12, 8).permute(0, 3, 1, 2),
        lambda x: x.permute(0, 1, 3, 2) + x,
        lambda x: x.permute(0, 1, 3, 2).relu(),
        lambda x: (x.permute(1, 2, 3, 0) * 2).cumsum(3).permute(3, 0, 1, 2),
        lambda x: x.permute(1, 0, 2, 3)[:, :1].permute(1, 0, 2, 3).repeat(2, 1, 1, 1),
        lambda x: x.chunk(2, 1)[1].repeat(1, 2, 1, 1),
        lambda x: x + x.flip(2),
    ],
)
def test_what_stands_between_convolutions_computes_the_same(between: Callable[..., Any], mode: str) -> None:
    _, modified = laid_out(lambda x, w: conv(between(conv(x, w)), w), IMAGES, WEIGHT, mode=mode)
    assert modified


def block(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """What ConvNeXt is made of: channels are normalized, and multiplied, as the last dimension."""
    normed = F.layer_norm(conv(x, w).permute(0, 2, 3, 1), (8,))
    return x + (F.linear(normed, inside) * scale).permute(0, 3, 1, 2)


def test_channels_that_are_the_last_dimension_in_between_are_not_moved_there() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return block(block(conv(x, w), w, *rest), w, *rest)

    gm, _ = laid_out(function, IMAGES, WEIGHT, torch.randn(8), torch.randn(8, 8))
    assert sum("clone" in name for name in names(gm)) == 2  # of the input, and of the output


def test_nor_are_their_gradients() -> None:
    def gradients(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        given = [one.detach().requires_grad_() for one in (x, *rest)]
        y = block(block(conv(given[0], given[1]), *given[1:]), *given[1:])
        return torch.autograd.grad(y.square().sum(), given)

    gm, _ = laid_out(gradients, IMAGES, WEIGHT, torch.randn(8), torch.randn(8, 8))
    # Of the input, and of its gradient.
    assert [str(node.target) for node in gm.graph.nodes if "clone" in str(node.target)] == ["aten.clone.default"] * 2


def test_what_was_put_in_order_is_an_alias_of_what_is() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv(x, w).permute(0, 2, 3, 1).contiguous().view(-1, 8).cumsum(0)

    gm, _ = laid_out(function, IMAGES, WEIGHT)
    assert [str(node.target) for node in gm.graph.nodes if node.op == "call_function"] == [
        "aten.clone.default",
        "aten.convolution.default",
        "aten.permute.default",
        "aten.alias.default",
        "aten.view.default",
        "aten.cumsum.default",
    ]


def test_images_whose_sides_change_places_are_put_in_order_once() -> None:
    gm, _ = laid_out(lambda x, w: conv(conv(x, w).permute(0, 1, 3, 2), w), IMAGES, WEIGHT)
    assert sum("clone" in name for name in names(gm)) == 3  # of the input, of what is permuted, and of the output


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_weights_stay_contiguous(groups: int, transposed: bool) -> None:
    weight = torch.randn(8, 8 // groups, 3, 3)

    def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.ops.aten.convolution_backward(
            x.sin(), x, w, [8], [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups, [True, True, True]
        )

    gm, modified = laid_out(gradients, IMAGES, weight)
    assert modified
    assert "contiguous_default" in names(gm)


def test_a_weight_larger_than_its_images_is_not_put_in_order() -> None:
    _, modified = laid_out(lambda x, w: conv(x, w).relu(), torch.randn(1, 8, 4, 4), WEIGHT)
    assert not modified


def test_images_in_channels_last_need_no_copy() -> None:
    gm, modified = laid_out(lambda x, w: conv(x, w).relu(), IMAGES.to(memory_format=torch.channels_last), WEIGHT)
    assert not modified
    assert names(gm) == ["convolution", "relu"]


def test_a_graph_that_sessions_share_stays_as_it_is() -> None:
    _, modified = laid_out(lambda x, w: conv(x, w).relu(), IMAGES, WEIGHT, chosen=False)
    assert not modified


def test_one_dimension_stays_as_it_is() -> None:
    _, modified = laid_out(lambda x, w: F.conv1d(x, w).relu(), torch.randn(2, 8, 40), torch.randn(8, 8, 3))
    assert not modified


def test_the_gradient_of_a_mean_is_divided_before_it_is_expanded() -> None:
    def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
        given = [one.detach().requires_grad_() for one in (x, w)]
        return torch.autograd.grad(conv(*given).mean((2, 3)).tanh().sum(), given)

    laid_out(gradients, IMAGES, WEIGHT, mode="symbolic")
    gm, _ = laid_out(gradients, IMAGES, WEIGHT)
    (division,) = (node for node in gm.graph.nodes if node.target is torch.ops.aten.div.Scalar)
    assert division.meta["val"].numel() == 16
    (expanded,) = division.users
    (copied,) = expanded.users
    assert copied.meta["val"].is_contiguous(memory_format=torch.channels_last)


def test_what_is_computed_before_it_is_expanded_stays_in_its_half() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return conv(x.sum((2, 3), keepdim=True).expand(2, 8, 12, 12) / 2, w)

    gm = make_fx(function, tracing_mode="fake")(IMAGES, WEIGHT)
    for node in gm.graph.nodes:
        node.meta |= {CHOSEN: "test"} if node.op == "call_function" else {}
        if node.target is torch.ops.aten.sum.dim_IntList:
            node.meta[HALF] = "is_forward"
    assert run_twice(LayOutChannelsLast(), gm)
    assert [node.name for node in gm.graph.nodes if HALF in node.meta] == ["sum_1"]


def test_what_is_expanded_late_is_as_traced_to_what_does_not_follow() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        means = conv(x, w).mean((2, 3), keepdim=True)
        return means.expand(2, 8, 6, 6).exp().view(2, -1).cumsum(1), means.expand(2, 8, 6, 6) + 1, conv(x, w)

    laid_out(function, IMAGES, WEIGHT)
