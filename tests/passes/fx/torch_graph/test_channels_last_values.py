"""Graphs in channels_last compute the same, in the strides of their fake values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from channels_last_graphs import IMAGES, WEIGHT, block, conv, converted, instance_norm


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
        lambda x: instance_norm(x.relu())[0],
        lambda x: instance_norm(x.view(x.shape) + 3, x.new_full((8,), 2.0), torch.arange(8.0))[0],
        lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2),
        lambda x: (x.permute(0, 2, 3, 1) * torch.arange(8.0)).sigmoid().permute(0, 3, 1, 2),
        lambda x: x.permute(0, 2, 3, 1).contiguous().view(-1, 8).softmax(1).view(2, 12, 12, 8).permute(0, 3, 1, 2),
        lambda x: x.permute(0, 2, 3, 1).flatten(1).cumsum(1).view(2, 12, 12, 8).permute(0, 3, 1, 2),
        lambda x: x.permute(0, 1, 3, 2) + x,
        lambda x: x.permute(0, 1, 3, 2).relu(),
        lambda x: (x.permute(1, 2, 3, 0) * 2).cumsum(3).permute(3, 0, 1, 2),
        lambda x: x.permute(1, 0, 2, 3)[:, :1].permute(1, 0, 2, 3).repeat(2, 1, 1, 1),
        lambda x: torch.cat([x[:, :4].tanh() * x[:, 4:].sigmoid(), x[:, 2:6]], 1),
        lambda x: torch.cat([x[:, :1].tanh(), x[:, 1:2] * 2] * 4, 1),
        lambda x: (
            x + conv(x[:, :1].tanh(), x.new_ones(8, 1, 3, 3)).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        ),
        lambda x: x + F.interpolate(F.adaptive_avg_pool2d(x, 1).relu() + 1, size=(12, 12)),
        lambda x: F.pad(x[:, :1].tanh(), (0, 0, 0, 0, 3, 4)),
        lambda x: x * conv(torch.cat([x.mean(1, True), x.amax(1, True)], 1), x.new_ones(1, 2, 3, 3)).sigmoid(),
        lambda x: F.prelu(x, x.new_full((8,), 0.1)),
        lambda x: torch.cat([F.prelu(one, x.new_full((1,), 0.1)) for one in x.split(3, 1)], 1),
        lambda x: x.cumsum(2).chunk(2, 1)[1].repeat(1, 2, 1, 1),
        lambda x: x.chunk(2, 1)[1].repeat(1, 2, 1, 1),
        lambda x: x + x.flip(2),
        lambda x: x + x.mean((2, 3), keepdim=True).expand(2, 8, 12, 12),
        lambda x: x * x.new_full((1,), 2).expand(2, 8, 12, 12),
        lambda x: x[:, :, :1, :1].expand(2, 8, 12, 12) * x[:1].expand(2, 8, 12, 12),
        lambda x: x * x.new_ones(1, 8, 12, 12),
        lambda x: x.to(torch.float64).to(torch.float32),
        lambda x: x.sort(1)[0] + x.cummax(2)[0],
        lambda x: x.sum((2, 3), keepdim=True) * x.sum(1, keepdim=True),
        lambda x: x.split(4, 1)[0].repeat(1, 2, 1, 1) + torch.cat(x.split(4, 1)[::-1], 1),
        lambda x: x.unbind(1)[3].unsqueeze(1).expand(2, 8, 12, 12),
    ],
)
def test_operators_between_convolutions_compute_the_same(between: Callable[..., Any], mode: str) -> None:
    _, modified = converted(lambda x, w: conv(between(conv(x, w)), w), IMAGES, WEIGHT, mode=mode)
    assert modified


def test_channels_that_are_last_in_between_are_moved_neither_there_nor_are_their_gradients() -> None:
    def gradients(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        given = [one.detach().requires_grad_() for one in (x, *rest)]
        y = block(block(conv(given[0], given[1]), *given[1:]), *given[1:])
        return torch.autograd.grad(y.square().sum(), given)

    gm, _ = converted(gradients, IMAGES, WEIGHT, torch.randn(8), torch.randn(8, 8))
    # One is of the input, the other of its gradient.
    assert [str(node.target) for node in gm.graph.nodes if "clone" in str(node.target)] == ["aten.clone.default"] * 2


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_weights_stay_contiguous(groups: int, transposed: bool) -> None:
    weight = torch.randn(8, 8 // groups, 3, 3)

    def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.ops.aten.convolution_backward(
            x.sin(), x, w, [8], [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups, [True, True, True]
        )

    gm, modified = converted(gradients, IMAGES, weight)
    assert modified
    (result,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
    (gradient,) = (part for part in result.users if part.args[1] == 1)
    assert [user.target for user in gradient.users] == [torch.ops.aten.contiguous.default]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_the_gradient_of_a_mean_computes_the_same(mode: str) -> None:
    def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
        given = [one.detach().requires_grad_() for one in (x, w)]
        return torch.autograd.grad(conv(*given).mean((2, 3)).tanh().sum(), given)

    _, modified = converted(gradients, IMAGES, WEIGHT, mode=mode)
    assert modified


def test_late_expansion_has_traced_strides_for_other_readers() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        means = conv(x, w).mean((2, 3), keepdim=True)
        return means.expand(2, 8, 6, 6).exp().view(2, -1).cumsum(1), means.expand(2, 8, 6, 6) + 1, conv(x, w)

    converted(function, IMAGES, WEIGHT)


def test_copies_that_a_caller_gets_share_no_memory() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        images = conv(x, w).permute(0, 2, 3, 1)
        return images.contiguous(), images.contiguous()

    gm, modified = converted(function, IMAGES, WEIGHT)
    assert modified
    first, second = gm(IMAGES, WEIGHT)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def test_a_gradient_that_is_left_alone_keeps_the_memory_of_its_results() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        given = (conv(x, w).exp().transpose(2, 3), x, w, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return torch.ops.aten.convolution_backward(*given, [True, True, False])[:2]

    _, modified = converted(function, IMAGES, WEIGHT)
    assert modified


@pytest.mark.parametrize("view", [lambda x: x.transpose(2, 3)[0], lambda x: x.chunk(2, 1), lambda x: x[:, 1:].view(-1)])
def test_views_of_a_convolution_that_is_left_alone_keep_its_memory(view: Callable[..., Any]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        viewed = view(conv(x.transpose(2, 3), w))
        return conv(x, w).relu(), *(viewed if isinstance(viewed, tuple) else (viewed,))

    _, modified = converted(function, IMAGES[:1], WEIGHT)
    assert modified
