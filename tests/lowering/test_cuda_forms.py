"""Forms that are written for CUDA's kernels give eager's results on the CPU, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from ort_dynamo.targets.target import Target
from ort_dynamo.testing import assert_like_eager, patch_facts


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower with the defects and the preferences of CUDA's kernels."""
    has_defect = Target.has_defect

    def has(self: Target, name: str) -> bool:
        return name in ("integers_reduced_in_float32", "layer_norm_of_one") or has_defect(self, name)

    monkeypatch.setattr(Target, "has_defect", has)
    patch_facts(monkeypatch, sums_in_order=False, prefers_dense_products=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x > 3).sum(),
        lambda x: (x > 3).sum(1, keepdim=True),
        lambda x: x.to(torch.int8).sum(0),
        lambda x: (x + (1 << 40)).sum(1),
        lambda x: x.prod(1),
        lambda x: (x.int() + (1 << 24)).amax(1),
        lambda x: (x.int() + (1 << 24)).amin((0, 1)),
        lambda x: x.int().max(0),
        lambda x: (x + (1 << 40)).amax(1),
        lambda x: (x - (1 << 62)).amin((0, 1)),
        lambda x: (x * (1 << 60)).max(0),
        lambda x: (x * (1 << 60)).sum(0),
    ],
)
def test_integers_are_reduced_as_integers(function: Callable[[torch.Tensor], Any]) -> None:
    assert_like_eager(function, torch.arange(12).reshape(3, 4), gradients=False)


@pytest.mark.parametrize("length", [1, 2, 70_000])
def test_rows_of_a_layer_norm(length: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, [length])

    assert_like_eager(function, torch.randn(3, length, requires_grad=True))
