"""Tests of the questions that the pass asks about nodes of images, one condition at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from image_graphs import convolution, traced
from torch import Tensor
from torch.fx import Node

from ort_dynamo.graph.marks import CHANNELS_LAST
from ort_dynamo.passes.fx.torch_graph.images import (
    channels_last,
    is_back,
    is_known,
    is_normalized,
    is_of_channels,
    is_permuted,
    viewed,
)
from ort_dynamo.torch_internals.kernels.operators import aten

IMAGE = torch.ones(2, 3, 4, 5)


def result(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> Node:
    """The node that a traced function returns."""
    (output,) = traced(function, *inputs, mode=mode).graph.find_nodes(op="output")
    (node,) = output.all_input_nodes
    return node


@pytest.mark.parametrize("order", [(), (0,), (0, 1), (0, 2, 1), (0, 2, 3, 1), (0, 2, 3, 4, 1)])
def test_channels_are_the_last_axis(order: tuple[int, ...]) -> None:
    assert channels_last(len(order)) == order


@pytest.mark.parametrize(
    ("function", "mode", "known"),
    [
        (lambda x: x * 2, "fake", True),
        (lambda x: x[:0] * 2, "fake", False),
        (lambda x: x * 2, "symbolic", False),
        (lambda x: x[:1, :2, :1, :1].sum((0, 2, 3)), "symbolic", True),
        (lambda x: x[:2, :2, :2, :2], "symbolic", False),  # its strides are symbolic
    ],
)
def test_a_shape_is_known_if_it_is_static_and_not_empty(function: Callable[..., Any], mode: str, known: bool) -> None:
    assert is_known(result(function, IMAGE, mode=mode).meta["val"]) == known


@pytest.mark.parametrize(
    ("image", "weight", "mode", "permuted"),
    [
        ((2, 4, 8, 8), (8, 4, 3, 3), "fake", True),
        ((2, 4, 8, 8), (8, 4, 3, 3), "symbolic", False),
        ((0, 4, 8, 8), (8, 4, 3, 3), "fake", False),
        ((2, 4, 8), (8, 4, 3), "fake", False),
        ((2, 4, 8, 8, 8), (8, 4, 3, 3, 3), "fake", False),
    ],
)
def test_convolutions_of_known_images_are_permuted(
    image: tuple[int, ...], weight: tuple[int, ...], mode: str, permuted: bool
) -> None:
    spatial = len(image) - 2

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return aten.convolution(x, w, b, [1] * spatial, [1] * spatial, [1] * spatial, False, [0] * spatial, 1)

    inputs = (torch.ones(image), torch.ones(weight), torch.ones(weight[0]))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert is_permuted(result(function, *(one.to(dtype) for one in inputs), mode=mode)) == permuted
    assert not is_permuted(result(function, *(one.double() for one in inputs), mode=mode))


def test_a_convolution_is_permuted_once_and_no_other_operator_is() -> None:
    node = result(lambda x, w: convolution(x, w), torch.ones(2, 4, 8, 8), torch.ones(8, 4, 3, 3))
    node.meta[CHANNELS_LAST] = frozenset({0})
    assert not is_permuted(node)
    assert not is_permuted(result(lambda x: x * x, IMAGE))


@pytest.mark.parametrize(
    ("function", "mode", "back"),
    [
        (lambda x: x.permute(0, 3, 1, 2), "fake", True),
        (lambda x: x.permute(0, -1, 1, 2), "fake", True),
        (lambda x: x[0].permute(0, 2, 1), "fake", True),
        (lambda x: x[None].permute(0, 4, 1, 2, 3), "fake", True),
        (lambda x: x.permute(0, 2, 3, 1), "fake", False),
        (lambda x: x[0, 0].permute(0, 1), "fake", False),
        (lambda x: x[:, :, :, :2].permute(0, 3, 1, 2), "fake", False),  # with gaps
        (lambda x: x[:0].permute(0, 3, 1, 2), "fake", False),
        (lambda x: x.permute(0, 3, 1, 2), "symbolic", False),
        (lambda x: x.view(2, 5, 3, 4), "fake", False),
    ],
)
def test_a_permutation_of_a_contiguous_tensor_gives_an_image(
    function: Callable[..., Any], mode: str, back: bool
) -> None:
    assert is_back(result(function, IMAGE, mode=mode)) == back


@pytest.mark.parametrize(
    ("given", "shape", "mode", "expanded"),
    [
        ((2, 3, 1, 1), (2, 3, 4, 5), "fake", True),
        ((2, 3, 1, 1), (2, 3, 1, 1), "fake", True),
        ((2, 1, 1, 1), (2, 3, 4, 5), "fake", False),
        ((1, 3, 1, 1), (2, 3, 4, 5), "fake", False),
        ((2, 3, 1, 5), (2, 3, 4, 5), "fake", False),
        ((2, 3, 4, 1), (2, 3, 4, 5), "fake", False),
        ((3, 1, 1), (2, 3, 4, 5), "fake", False),
        ((2, 3, 1), (2, 3, 4), "fake", False),
        ((2, 3, 1, 1, 1), (2, 3, 4, 5, 6), "fake", False),
        ((2, 2, 1, 1), (2, 2, 2, 4, 5), "fake", False),
        ((0, 3, 1, 1), (0, 3, 4, 5), "fake", False),
        ((2, 3, 1, 1), (2, 3, 0, 5), "fake", False),
        ((2, 3, 1, 1), (2, 3, 4, 5), "symbolic", False),
    ],
)
def test_one_scalar_per_channel_is_expanded(
    given: tuple[int, ...], shape: tuple[int, ...], mode: str, expanded: bool
) -> None:
    assert is_of_channels(result(lambda x: x.expand(shape), torch.ones(given), mode=mode)) == expanded
    assert not is_of_channels(result(lambda x: x * 2, torch.ones(given), mode=mode))


@pytest.mark.parametrize(
    ("shape", "mode", "normalized"),
    [
        ((2, 3, 4, 4), "fake", True),
        ((4, 3), "fake", True),
        ((1, 3, 2, 2), "fake", True),
        ((3, 3), "fake", False),
        ((1, 3, 1, 2), "fake", False),
        ((2, 1, 4, 4), "fake", False),
        ((0, 3, 4, 4), "fake", False),
        ((2, 3, 4, 4), "symbolic", False),
    ],
)
def test_a_batch_norm_of_several_channels_and_four_positions_becomes_sums(
    shape: tuple[int, ...], mode: str, normalized: bool
) -> None:
    assert is_normalized(result(lambda x: x * 2, torch.ones(shape), mode=mode).meta["val"]) == normalized


@pytest.mark.parametrize(
    ("shape", "groups", "normalized"),
    [((1, 8, 1, 1), 2, True), ((5, 8), 2, True), ((5, 8), 4, False), ((5, 6, 1, 1), 2, False), ((5, 8, 1, 4), 8, True)],
)
def test_a_group_norm_of_four_elements_becomes_sums(shape: tuple[int, ...], groups: int, normalized: bool) -> None:
    assert is_normalized(result(lambda x: x * 2, torch.ones(shape)).meta["val"], groups) == normalized


def reordered(function: Callable[[Tensor], Tensor], inner: Tensor) -> tuple[Tensor, bool] | None:
    """The view of an image that reads its inner tensor, and whether that has the channels last; None if no call does.

    The inner tensor has the image's elements with the channels last.
    """
    node = result(function, inner.permute(0, -1, *range(1, inner.dim() - 1)))
    found = viewed(node, result(lambda x: x, inner))
    if found is None:
        return None
    target, args, is_image = found
    return target(inner, *args[1:]), is_image


@pytest.mark.parametrize(
    ("function", "is_image"),
    [
        (lambda x: aten.alias(x), True),
        (lambda x: aten.detach(x), True),
        (lambda x: x.permute(0, 2, 3, 1), False),
        (lambda x: x.permute(0, -2, -1, 1), False),
        (lambda x: aten.slice(x, 2, 1, 3), True),
        (lambda x: aten.slice(x, -1, 1, 5, 2), True),
        (lambda x: aten.slice(x, 1, 0, 2), True),
        (lambda x: aten.slice(x), True),
        (lambda x: x.reshape(2, 3, 20), True),
        (lambda x: x.reshape(2, 3, 2, 2, 5), True),
    ],
)
def test_a_view_of_an_image_is_a_view_of_its_inner_tensor(function: Callable[[Tensor], Tensor], is_image: bool) -> None:
    inner = torch.randn(2, 4, 5, 3)
    found = reordered(function, inner)
    assert found is not None
    value, is_in_channels_last = found
    assert is_in_channels_last == is_image
    if is_image:
        value = value.permute(0, -1, *range(1, value.dim() - 1))
    torch.testing.assert_close(value, function(inner.permute(0, 3, 1, 2)), rtol=0, atol=0)


def test_a_transposition_of_a_sequence_is_its_inner_tensor() -> None:
    inner = torch.randn(2, 5, 3)
    for axes in ((1, 2), (-1, 1)):
        found = reordered(lambda x: x.transpose(*axes), inner)  # noqa: B023
        assert found is not None
        torch.testing.assert_close(found[0], inner, rtol=0, atol=0)
        assert not found[1]


@pytest.mark.parametrize(
    ("function", "mode"),
    [
        (lambda x: x.permute(0, 2, 1, 3), "fake"),
        (lambda x: x.transpose(1, 2), "fake"),
        (lambda x: x.reshape(6, 20), "fake"),
        (lambda x: x.reshape(120), "fake"),
        (lambda x: x.reshape(2, 60), "fake"),
        (lambda x: x.reshape(x.shape[0], x.shape[1], -1), "symbolic"),
        (lambda x: x * 2, "fake"),
    ],
)
def test_other_nodes_read_the_image(function: Callable[[Tensor], Tensor], mode: str) -> None:
    node = result(function, IMAGE, mode=mode)
    inner = result(lambda x: x, torch.ones(2, 4, 5, 3), mode=mode)
    assert viewed(node, inner) is None


def test_a_reshape_of_an_inner_tensor_with_gaps_reads_the_image() -> None:
    node = result(lambda x: x.reshape(2, 3, 20), IMAGE)
    whole, halves = torch.ones(2, 4, 5, 3), torch.ones(2, 4, 5, 6)
    assert viewed(node, result(lambda x: x, whole)) is not None
    assert viewed(node, result(lambda x: x[..., :3], halves)) is None
