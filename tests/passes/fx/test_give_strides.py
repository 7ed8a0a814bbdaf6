"""Strides of dimensions of one element: their source, and how results get them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites
from ort_dynamo.passes.fx.analysis.eager_strides import returned_strides
from ort_dynamo.passes.fx.give_strides import GiveStrides, strided
from ort_dynamo.passes.running import run_passes


def test_strided_changes_dimensions_of_one_element_alone() -> None:
    x = torch.rand(4, 3, 1, 1)
    given = strided(x, (3, 1, 3, 3), x.stride())
    assert given.stride() == (3, 1, 3, 3)
    assert given.data_ptr() == x.data_ptr()
    assert strided(x, (99, 99, 7, 7), (99, 99, 1, 1)).stride() == (3, 1, 7, 7)
    assert strided(x, x.stride(), x.stride()) is x


@pytest.mark.parametrize(
    "function",
    [
        torch.clone,
        torch.ones_like,
        torch.relu,
        lambda x: x + 1,
        lambda x: (x * 2).mT.exp(),
        lambda x: x * torch.ones(5, 1),
    ],
)
def test_strides_of_a_traced_graph_are_eagers(function: Callable[..., Any]) -> None:
    x = torch.rand(1, 5).t()
    gm = make_fx(lambda x: [function(x)], tracing_mode="fake")(x)
    assert returned_strides(gm.graph) == {0: function(x).stride()}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.huber_loss(x, x + 1),
        lambda x: F.huber_loss(x, x + 1, reduction="sum"),
        lambda x: torch.addr(x[0], x[:, 0], x[0]),
    ],
)
def test_a_result_of_another_shape_does_not_follow_the_first_operand(function: Callable[..., Any]) -> None:
    x = torch.rand(5, 1)
    gm = make_fx(lambda x: [x + 1, function(x)], tracing_mode="fake")(x)
    assert returned_strides(gm.graph)[0] == x.stride()


def test_symbolic_sizes_have_no_rule() -> None:
    gm = make_fx(lambda x: [x + 1, (x * 2).t().exp()], tracing_mode="symbolic")(torch.rand(1, 5).t())
    assert returned_strides(gm.graph) == {}


def test_a_second_run_changes_nothing_and_other_outputs_stay() -> None:
    gm = make_fx(lambda x: [x + 1, x.sum(0)], tracing_mode="fake")(torch.rand(1, 5).t())
    pass_ = GiveStrides(slice(None), returned_strides(gm.graph))
    assert_fx_rewrites(
        pass_,
        """
        x_1: f32[5, 1]
        add = aten.add.Tensor(x_1, 1)  # f32[5, 1]
        sum = aten.sum.dim_IntList(x_1, [0])  # f32[1]
        return [add, sum]
        """,
        """
        x_1: f32[5, 1]
        add = aten.add.Tensor(x_1, 1)  # f32[5, 1]
        sum = aten.sum.dim_IntList(x_1, [0])  # f32[1]
        strided = strided(add, (1, 5), (1, 1))  # f32[5, 1]
        return [strided, sum]
        """,
        gm,
    )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="ort_train", options={"placement": "onnxruntime"})


@pytest.mark.parametrize("training", [False, True])
def test_a_layout_of_another_call_is_another_result(training: bool) -> None:
    run = compiled(lambda x: x + 1)
    for x in (torch.rand(1, 5).t(), torch.rand(5, 1), torch.rand(1, 5).t()):
        assert run(x.requires_grad_(training)).stride() == (x + 1).stride()


def test_a_result_with_given_strides_may_be_written_to() -> None:
    x = torch.rand(1, 5).t().requires_grad_()
    result = compiled(lambda x: x * 2)(x)
    result.mul_(3)
    result.sum().backward()
    assert torch.equal(x.grad, torch.full((5, 1), 6.0))


@pytest.mark.parametrize("weights_last", [False, True])
@pytest.mark.parametrize("images_last", [False, True])
@pytest.mark.parametrize("form", [(4, 8, 1, 1), (4, 4, 3, 4), (1, 4, 3, 1), (4, 1, 3, 1)], ids=str)
@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_gradients_of_convolutions_have_eagers_strides(
    form: tuple[int, ...], images_last: bool, weights_last: bool, placement: str
) -> None:
    """DistributedDataParallel warns where a gradient's strides are not its parameter's."""
    given, made, size, groups = form
    layer = torch.nn.Conv2d(given, made, size, groups=groups)
    x = torch.randn(16, given, 5, 5)  # fewer, in one thread, are not oneDNN's
    layer = layer.to(memory_format=torch.channels_last) if weights_last else layer
    x = x.contiguous(memory_format=torch.channels_last) if images_last else x
    run = torch.compile(layer, backend="ort_train", options={"placement": placement})

    def strides(module: Callable[..., torch.Tensor]) -> list[tuple[int, ...]]:
        result = module(x.requires_grad_())
        gradients = torch.autograd.grad(F.gelu(result).sum(), [x, *layer.parameters()])
        return [one.stride() for one in (result, *gradients)]

    assert strides(run) == strides(layer)


@pytest.mark.parametrize(
    "function", [torch.relu, F.leaky_relu, F.gelu, F.silu, F.hardtanh], ids=lambda one: one.__name__
)
def test_a_gradient_of_one_image_in_channels_last_is_eagers(function: Callable[..., Any]) -> None:
    """Its strides follow from the order in which the operator of the gradient reads its operands."""
    x = torch.randn(1, 3, 5, 4).to(memory_format=torch.channels_last).requires_grad_()
    (expected,) = torch.autograd.grad(function(x).mean(), x)
    (gradient,) = torch.autograd.grad(compiled(lambda x: function(x).mean())(x), x)
    torch.testing.assert_close(gradient, expected)
    assert gradient.stride() == expected.stride()


def test_a_rule_that_contradicts_memory_is_not_followed() -> None:
    x = torch.rand(1, 3, 5, 4)
    gm = make_fx(lambda x: [x + 1], tracing_mode="fake")(x)
    run_passes([GiveStrides(slice(None), {0: (60, 1, 12, 3)})], gm, check=True)
    assert gm(x)[0].stride() == (60, 20, 4, 1)
    torch.testing.assert_close(gm(x)[0], x + 1)
