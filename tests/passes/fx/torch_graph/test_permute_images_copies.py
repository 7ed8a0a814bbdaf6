"""Tests of the copies that readers of permuted images get: in which half of a joint graph, and how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from image_graphs import CLOSE, SMALL, W, X, convolution, random, traced
from torch import Tensor
from torch.fx import GraphModule, Node

from ort_dynamo.graph.marks import HALF
from ort_dynamo.passes.fx.torch_graph.permute_images import PermuteImages
from ort_dynamo.testing import assert_close
from ort_dynamo.torch_internals.kernels.operators import aten


def changed(function: Callable[..., Any], *inputs: Tensor, backward: tuple[str, ...] = ()) -> GraphModule:
    """The graph after the pass; these nodes are in the backward half, and all others in the forward half."""
    gm = traced(function, *inputs)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.meta[HALF] = "is_backward" if node.name in backward else "is_forward"
    result = PermuteImages()(gm)
    assert result is not None
    assert result.modified
    return gm


def copies(gm: GraphModule, *targets: Any) -> list[Node]:
    """The copies that nodes of these operators, or the output, read."""
    readers = [node for node in gm.graph.nodes if node.target in targets]
    read = {one for reader in readers for one in reader.all_input_nodes}
    return [node for node in gm.graph.nodes if node in read and node.target is aten.clone.default]


@pytest.mark.parametrize("backward", [(), ("flip_1",), ("flip", "flip_1")])
def test_each_half_reads_a_copy_of_its_own(backward: tuple[str, ...]) -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        image = convolution(x, w)
        return image.flip(1), image.flip(2)

    found = copies(changed(function, X, W, backward=backward), aten.flip.default)
    halves = {"is_backward" if name in backward else "is_forward" for name in ("flip", "flip_1")}
    assert sorted(node.meta[HALF] for node in found) == sorted(halves)


def test_a_result_is_copied_where_it_is_computed() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        image = convolution(x, w)
        return image, image.flip(1)

    gm = changed(function, X, W, backward=("flip",))
    assert [node.meta[HALF] for node in copies(gm, "output")] == ["is_forward"]
    assert [node.meta[HALF] for node in copies(gm, aten.flip.default)] == ["is_backward"]


def test_a_view_that_is_a_result_reads_no_copy_of_a_later_reader() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        image = convolution(x, w)
        view = aten.slice(image, 3, 0, 7)
        return image.flip(1), view

    gm = changed(function, X, W)
    for ours, theirs in zip(gm(X, W), function(X, W), strict=True):
        assert_close(ours, theirs, "a result", CLOSE)


def test_an_expanded_image_is_copied_once() -> None:
    def function(g: Tensor, v: Tensor) -> Any:
        image = g.expand(2, 8, 8, 8)
        return convolution(image, v), convolution(image, v * 2), convolution(image, v * 3)

    gm = changed(function, random(2, 8, 1, 1), SMALL)
    assert len({node.args[0] for node in gm.graph.nodes if node.target is aten.convolution.default}) == 1


def test_a_view_that_is_read_as_traced_shares_the_copy_of_its_image() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        image = convolution(x, w).relu()
        return image.flip(1), aten.slice(image, 1, 0, 4).flip(1), aten.alias(image).flip(1)

    gm = changed(function, X, W)
    assert len(copies(gm, aten.flip.default, aten.slice.Tensor, aten.alias.default)) == 1
    image = random(2, 4, 8, 8)
    for ours, theirs in zip(gm(image, W), function(image, W), strict=True):
        assert_close(ours, theirs, "a flip", CLOSE)
