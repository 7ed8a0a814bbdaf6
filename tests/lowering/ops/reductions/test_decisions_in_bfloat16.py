"""An operator that jumps decides by the value that is rounded to bfloat16, as everything else that reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

INDICES: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "max": lambda y: y.max(-1, keepdim=True),
    "min": lambda y: y.min(-1, keepdim=True),
    "max_of_wide": lambda y: y.float().max(-1, keepdim=True),
    "median": lambda y: y.median(-1, keepdim=True),
    "kthvalue": lambda y: y.kthvalue(2, -1, keepdim=True),
    "cummax": lambda y: y.cummax(-1),
    "cummin": lambda y: y.cummin(-1),
    "topk": lambda y: y.topk(3, -1),
    "max_pool": lambda y: F.max_pool1d(y, 8, return_indices=True),
}
"""Give values and their indices in the last dimension; equal values may have other indices."""

EXACT: Mapping[str, Callable[[Tensor], Any]] = {
    "argmax": lambda y: y.argmax(-1),
    "is_largest": lambda y: y == y.amax(-1, keepdim=True),
    "is_largest_of_wide": lambda y: y.float() == y.float().amax(-1, keepdim=True),
    "is_largest_of_all": lambda y: y == y.max(),
    "largest_less_itself": lambda y: (y - y.amax(-1, keepdim=True)) == 0,
    "is_size": lambda y: y.norm(float("inf"), -1, keepdim=True) == y.abs(),
    "is_maximum": lambda y: torch.maximum(y, y.roll(1, 0)) == y,
    "third_largest": lambda y: y >= y.topk(3, -1)[0][..., -1:],
    "at_least_median": lambda y: y >= y.median(),
    "trunc": lambda y: (y * 8).trunc(),
    "frac": lambda y: (y * 8).frac(),
    "round": lambda y: (y * 8).round(),
    "floor_divide": lambda y: torch.div(y, 0.25, rounding_mode="floor"),
    "to_integer": lambda y: (y * 8).int(),
    "bucketize": lambda y: torch.bucketize(y, torch.linspace(-1, 1, 9).to(y.dtype)),
    "searchsorted": lambda y: torch.searchsorted(torch.linspace(-1, 1, 9).to(y.dtype), y),
    "histogram": lambda y: torch.histc(y.float(), 8, -1, 1),
    "heaviside": lambda y: torch.heaviside(y, y),
}


@pytest.fixture(scope="module")
def layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(72, 8).bfloat16()


def results(layer: nn.Module, operator: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
    """A layer's result, and an operator's of it, in one graph."""

    def function(x: Tensor) -> tuple[Tensor, Any]:
        y = layer(x)
        return y, operator(y)

    torch.manual_seed(1)
    with torch.no_grad():
        options = {"placement": "onnxruntime"}
        y, found = torch.compile(function, backend="ort_train", options=options)(torch.randn(3, 8, 72).bfloat16())
    return y, found


@pytest.mark.parametrize("name", EXACT)
def test_the_results_are_those_of_the_rounded_values(layer: nn.Module, name: str) -> None:
    y, found = results(layer, EXACT[name])
    for mine, eager in zip(tree_leaves(found), tree_leaves(EXACT[name](y)), strict=True):
        torch.testing.assert_close(mine, eager, rtol=0, atol=0)


@pytest.mark.parametrize("name", INDICES)
def test_the_values_at_the_indices_are_those_of_eager(layer: nn.Module, name: str) -> None:
    y, (values, indices) = results(layer, INDICES[name])
    eager, theirs = INDICES[name](y)
    torch.testing.assert_close(values, eager, rtol=2**-7, atol=0)
    assert indices.dtype == theirs.dtype
    assert torch.equal(y.gather(-1, indices), y.gather(-1, theirs))


def test_autocast_predicts_like_eager() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.randn(2, 3, 8)

    def predictions() -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = layer(x)
            return logits, logits.max(-1)[1]

    logits, found = torch.compile(predictions, backend="ort_train")()
    assert torch.equal(logits.gather(-1, found[..., None])[..., 0], logits.amax(-1))
