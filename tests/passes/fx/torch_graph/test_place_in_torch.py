"""Tests of the nodes that are marked for torch, and of the reasons."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_twice import run_twice
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.graph.marks import CHOSEN
from ort_dynamo.passes.fx.torch_graph.place_in_torch import CONVOLVES, SURROUNDS, PlaceInTorch
from ort_dynamo.runtime.installed.providers import recorded_cpu_targets, recorded_cuda_targets

_TARGET = recorded_cpu_targets()[-1]


def marks(function: Callable[..., Any], *shapes: tuple[int, ...], threads: int = 1, **given: Any) -> Counter[str]:
    """Reason -> how many nodes of the function's graph have it; a second run must change nothing."""
    dtype = given.pop("dtype", torch.float32)
    tensors = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    gm = make_fx(function, tracing_mode=given.pop("tracing_mode", "fake"))(*tensors)
    modified = run_twice(PlaceInTorch(given.pop("target", _TARGET), threads), gm)
    found = Counter(node.meta[CHOSEN] for node in gm.graph.nodes if CHOSEN in node.meta)
    assert modified == bool(found)
    return found


IMAGES, WEIGHT = (2, 8, 16, 16), (8, 8, 3, 3)


def convolved(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, padding=1).relu()


def test_with_one_thread_a_graph_of_convolutions_is_torchs_for_the_layout() -> None:
    assert marks(convolved, IMAGES, WEIGHT) == {CONVOLVES: 1, SURROUNDS: 1}


@pytest.mark.parametrize(("threads", "expected"), [(1, {CONVOLVES: 1}), (4, {})])
def test_products_of_matrices_outweigh_a_convolution(threads: int, expected: dict[str, int]) -> None:
    # With several threads a session could not run between torch's operators, with one it can.
    def function(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> Any:
        return m @ m, convolved(x, w)

    assert marks(function, IMAGES, WEIGHT, (256, 256), threads=threads) == expected
    assert marks(function, IMAGES, WEIGHT, (16, 16), threads=threads) == {CONVOLVES: 1, SURROUNDS: 2}


def test_without_a_layout_to_gain_products_weigh_more() -> None:
    # As many multiplications in convolutions, and as many in products: of images all is torch's, of sequences not.
    assert SURROUNDS in marks(lambda x, w, m: (m @ m, F.conv2d(x, w)), (1, 8, 18, 18), (8, 8, 3, 3), (64, 64))
    sequences = marks(lambda x, w, m: (m @ m, F.conv1d(x, w)), (1, 8, 258), (8, 8, 9), (64, 64))
    assert sequences == {CONVOLVES: 1}


@pytest.mark.parametrize(
    ("weight", "arguments"),
    [
        ((16, 8, 1, 1), {}),
        ((16, 8, 1, 1), {"stride": 2}),
        ((16, 8, 4, 4), {"stride": 4}),
        ((16, 8, 2, 4), {"stride": (2, 4)}),
    ],
)
def test_convolutions_that_are_products_of_matrices_are_the_sessions(
    weight: tuple[int, ...], arguments: dict[str, Any]
) -> None:
    assert not marks(lambda x, w: F.conv2d(x, w, **arguments), IMAGES, weight)


@pytest.mark.parametrize(
    ("weight", "arguments"),
    [
        ((16, 8, 1, 1), {"padding": 1}),
        ((16, 4, 1, 1), {"groups": 2}),
        ((16, 8, 4, 4), {"stride": 3}),
        ((16, 8, 4, 4), {"stride": 4, "padding": 2}),
        ((16, 8, 2, 2), {"stride": 2, "dilation": 2}),
        ((8, 1, 3, 3), {"groups": 8}),
    ],
)
def test_the_nearest_other_convolutions_are_torchs(weight: tuple[int, ...], arguments: dict[str, Any]) -> None:
    assert marks(lambda x, w: F.conv2d(x, w, **arguments), IMAGES, weight) == {CONVOLVES: 1}


@pytest.mark.parametrize("dimensions", [1, 3])
def test_other_dimensions_are_torchs_as_well(dimensions: int) -> None:
    convolve = {1: F.conv1d, 3: F.conv3d}[dimensions]
    shape = (2, 8, *[8] * dimensions), (8, 8, *[3] * dimensions)
    assert marks(lambda x, w: convolve(x, w), *shape) == {CONVOLVES: 1}


def test_gradients_go_where_their_convolution_goes() -> None:
    def gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
        return torch.ops.aten.convolution_backward(
            x, x, w, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )

    assert marks(gradients, IMAGES, WEIGHT) == {CONVOLVES: 1}


def test_symbolic_sizes_are_estimated_by_their_example() -> None:
    assert marks(convolved, IMAGES, WEIGHT, threads=2, tracing_mode="symbolic")[CONVOLVES] == 1


def test_no_kernel_of_onednn_is_preferred_for_float64() -> None:
    assert not marks(convolved, IMAGES, WEIGHT, dtype=torch.float64)


def test_a_file_that_stands_alone_is_whole() -> None:
    assert not marks(convolved, IMAGES, WEIGHT, target=dataclasses.replace(_TARGET, stands_alone=True))


def test_another_device_has_facts_of_its_own() -> None:
    cuda = recorded_cuda_targets()[-1]
    assert not marks(convolved, IMAGES, WEIGHT, target=cuda, threads=8)
