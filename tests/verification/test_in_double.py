"""A program under InDouble has its own results and float64 results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ort_dynamo.verification.in_double import InDouble


def both(function: Any, *args: Any) -> tuple[Any, Any]:
    """The results of a function as it is, and those in float64."""
    mode = InDouble()
    with mode:
        results = function(*args)
    return results, mode.read(results)


def test_float64_is_exact_where_float32_is_not() -> None:
    x = torch.tensor([1e8, 1.0, -1e8])
    found, wide = both(lambda x: (x[0] + x[1]) + x[2], x)
    assert found == 0
    assert (wide, wide.dtype) == (1, torch.float64)


def test_views_and_writes_are_seen() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        y.t()[0].add_(1e-9)
        return y[:, 0]

    found, wide = both(write, torch.ones(2, 3))
    assert torch.equal(found, torch.full((2,), 3.0))
    assert torch.equal(wide, torch.full((2,), 3.0 + 1e-9, dtype=torch.float64))


def test_gradients_are_those_of_the_model_in_float64() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 1))
    x = torch.randn(3, 5)
    weights = list(model.parameters())
    mode = InDouble()
    with mode:
        found = torch.autograd.grad(model(x).sum(), weights)
    wide = [mode.read(one) for one in found]
    for one, expected in zip(found, torch.autograd.grad(model(x).sum(), weights), strict=True):
        assert torch.equal(one, expected), "the program's own results are not touched"
    exact = torch.autograd.grad(model.double()(x.double()).sum(), list(model.parameters()))
    for one, other in zip(wide, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_random_numbers_are_the_programs(p: float) -> None:
    x = torch.randn(50)
    for dropout in (nn.functional.dropout, lambda x, p: torch.native_dropout(x, p, True)[0]):
        torch.manual_seed(1)
        expected = dropout(x, p)
        torch.manual_seed(1)
        found, wide = both(lambda x: dropout(x, p), x)  # noqa: B023
        assert torch.equal(found, expected)
        torch.testing.assert_close(wide.float(), expected)


def test_autocast_is_undone_in_float64() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found, wide = both(lambda x: x @ x, torch.full((2, 2), 1.001))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(wide, torch.full((2, 2), 2 * 1.001**2, dtype=torch.float64), rtol=1e-7, atol=0)


def test_integers_and_buffers_without_change_are_as_they_are() -> None:
    counts = torch.arange(3)
    found, wide = both(lambda x: x + 1, counts)
    assert torch.equal(found, wide)


def test_allocations_that_are_gone_are_forgotten() -> None:
    mode = InDouble()
    with mode:
        x = torch.ones(3)
        for _ in range(600):
            x = x + 1
    assert len(mode._beside) < 520
