"""A sigmoid has its digits far below zero, too, where a logarithm or a loss reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

FARTHEST = {torch.float32: -80.0, torch.float64: -700.0}


def ranked(x: Tensor) -> Tensor:
    return -(1e-10 + x.sigmoid()).log()  # Rendle et al.: BPR, 2009, as recommenders write it


@pytest.mark.parametrize(
    "function",
    [
        torch.sigmoid,
        ranked,
        lambda x: x.sigmoid().log(),
        F.softplus,
        lambda x: F.logsigmoid(-x),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x), reduction="none"),
        lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x), reduction="none"),
    ],
    ids=["sigmoid", "ranked", "logarithm", "softplus", "logsigmoid", "bce of logits", "bce"],
)
@pytest.mark.parametrize("dtype", FARTHEST)
def test_each_element_and_gradient_is_eagers(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    found = []
    for called in (function, torch.compile(function, backend="ort_train", fullgraph=True)):
        x = torch.linspace(FARTHEST[dtype], 20, 501, dtype=dtype, requires_grad=True)
        y = called(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        found.append((y.detach(), gradient))
    assert counters["ort_train"]["native_nodes"]
    rounding = 1e-5 if dtype == torch.float32 else 1e-8  # eager rounds a constant of a loss to float32
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=rounding, atol=torch.finfo(dtype).tiny)
