"""Graphs of convolutions, before and after PermuteImages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.fx_testing import assert_fx_rewrites
from ort_dynamo.passes.fx.torch_graph.permute_images import CONVOLVES, PermuteImages
from ort_dynamo.testing import Tolerance
from ort_dynamo.torch_internals.kernels.operators import aten

__all__ = [
    "CHOSEN",
    "IN_TORCH",
    "PADDED",
    "PIXELS",
    "SMALL",
    "W",
    "X",
    "assert_permuted",
    "convolution",
    "random",
    "traced",
]

CLOSE = Tolerance(1e-4, 1e-4)

PADDED = "None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1"
PIXELS = "None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1"
"""The arguments of a convolution that keeps an image's size: of three times three pixels, and of one."""

CHOSEN = f"chosen={CONVOLVES!r}"
IN_TORCH = f"channels_last=[0] | {CHOSEN}"


def convolution(x: Tensor, w: Tensor, stride: int = 1) -> Tensor:
    return aten.convolution(x, w, None, [stride] * 2, [w.shape[-1] // 2] * 2, [1, 1], False, [0, 0], 1)


def traced(function: Callable[..., Any], *inputs: Tensor, mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def assert_permuted(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    before: str,
    after: str,
    tolerance: Tolerance = CLOSE,
) -> GraphModule:
    """Check the pass's rewrite of a function's graph, and that it computes the same."""
    gm = traced(function, *inputs)
    return assert_fx_rewrites(PermuteImages(), before, after, gm, inputs=inputs, tolerance=tolerance)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X, W, SMALL = random(2, 4, 8, 8), random(8, 4, 3, 3), random(8, 8, 1, 1)
