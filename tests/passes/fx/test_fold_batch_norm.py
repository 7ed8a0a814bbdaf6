"""Which normalizations become part of a convolution; what is computed stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_twice import run_twice
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ort_dynamo.marks import CHOSEN
from ort_dynamo.passes.fx.fold_batch_norm import FoldBatchNorm
from ort_dynamo.testing import Tolerance, assert_close

torch.manual_seed(0)
IMAGES, KERNEL = torch.randn(2, 3, 12, 12), torch.randn(4, 3, 3, 3)
OTHER = torch.randn(4, 4, 3, 3)
STATISTICS = (torch.randn(4), torch.rand(4) + 0.5)
AFFINE = (torch.randn(4), torch.randn(4))
NORM = (*STATISTICS, *AFFINE)


def folded(function: Callable[..., Any], *inputs: Tensor, chosen: bool = True) -> tuple[GraphModule, bool]:
    """The graph of `function` after the pass; it must compute the same, and a second run must change nothing."""
    with torch.no_grad():
        gm = make_fx(function, tracing_mode="fake")(*inputs)
    for node in gm.graph.nodes:
        if chosen and "convolution" in node.name:
            node.meta[CHOSEN] = "test"
    modified = run_twice(FoldBatchNorm(), gm)
    for mine, wanted in zip(gm(*inputs), function(*inputs), strict=True):
        assert_close(mine, wanted, "result", Tolerance(1e-5, 1e-5))
    return gm, modified


def names(gm: GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Any, bias: Any, eps: float = 1e-5) -> Tensor:
    made: Tensor = torch.ops.aten._native_batch_norm_legit_no_training(x, weight, bias, mean, variance, 0.1, eps)[0]
    return made


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dim", [1, 2])
def test_a_normalization_after_a_convolution_is_folded(biased: bool, dim: int) -> None:
    images, kernel = (IMAGES, KERNEL) if dim == 2 else (IMAGES[..., 0].repeat(1, 1, 9), KERNEL[..., 0])
    convolve = F.conv2d if dim == 2 else F.conv1d

    def function(x: Tensor, w: Tensor, offset: Tensor, *given: Tensor) -> tuple[Tensor]:
        return (norm(convolve(x, w, offset if biased else None), *given).relu(),)

    gm, modified = folded(function, images, kernel, torch.randn(4), *NORM)
    assert modified
    assert not any("batch_norm" in name for name in names(gm))
    assert sum("convolution" in name for name in names(gm)) == 1
    assert all(CHOSEN in node.meta for node in gm.graph.nodes if node.op == "call_function" and "relu" not in node.name)


def test_several_are_folded_together_and_those_of_another_epsilon_apart() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, *given: Tensor) -> tuple[Tensor]:
        y = norm(F.conv2d(x, w), *given).relu()
        y = norm(F.conv2d(y, v, groups=1), *given).relu()
        return (norm(F.conv2d(y, v), *given, eps=1e-2),)

    gm, modified = folded(function, IMAGES, KERNEL, OTHER, *NORM)
    assert modified
    assert not any("batch_norm" in name for name in names(gm))
    assert names(gm).count("aten.rsqrt.default") == 2


@pytest.mark.parametrize(
    "nearest_other",
    {
        "something else reads what is between": lambda x, w, *n: (norm(y := F.conv2d(x, w), *n), y),
        "the weight is larger": lambda x, w, *n: (norm(F.conv2d(x[..., :4, :4], w), *n),),
        "another dtype": lambda x, w, *n: (norm(F.conv2d(x.double(), w.double()), *(one.double() for one in n)),),
        "transposed": lambda x, w, *n: (norm(F.conv_transpose2d(x, w.transpose(0, 1)), *n),),
        "no weight": lambda x, w, mean, variance, *_: (norm(F.conv2d(x, w), mean, variance, None, None),),
        "computed statistics": lambda x, w, mean, *n: (norm(F.conv2d(x, w), mean * 2, *n),),
        "by the batch": lambda x, w, *n: (F.batch_norm(F.conv2d(x, w), None, None, n[2], n[3], True),),
        "no convolution": lambda x, w, *n: (norm(F.conv2d(x, w).relu(), *n),),
    }.values(),
)  # fmt: skip
def test_others_stay(nearest_other: Callable[..., tuple[Tensor, ...]]) -> None:
    assert not folded(nearest_other, IMAGES, KERNEL, *NORM)[1]


def test_a_convolution_of_a_session_stays() -> None:
    assert not folded(lambda x, w, *n: (norm(F.conv2d(x, w), *n),), IMAGES, KERNEL, *NORM, chosen=False)[1]
