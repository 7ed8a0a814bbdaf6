"""Tests of Python's `random` inside a compiled function."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ort_dynamo.testing import assert_close


def in_every_dtype(x: torch.Tensor) -> Any:
    drawn = random.uniform(1, 2)
    return x * drawn, x.double() * drawn, x.half() * drawn, x.long() + drawn, x.sum() * drawn


def out_of_the_graph(x: torch.Tensor) -> Any:
    drawn = random.uniform(0, 1)
    return x + 1, drawn, drawn * 2


def among_integers_and_bools(x: torch.Tensor) -> Any:
    drawn = random.uniform(1, 2)
    return x * drawn, (x > 0) * drawn, drawn - x.int(), x.long().double() * drawn, torch.where(x > 0, drawn, 0.0)


def several_and_integers(x: torch.Tensor) -> Any:
    return (
        x * random.uniform(0, 1) + random.uniform(-1, 1),
        x + random.randint(1, 9),
        torch.full_like(x, random.uniform(0, 1)),
    )


def given_to_a_function(x: torch.Tensor) -> Any:
    return (
        torch.lerp(x, x * 2, random.uniform(0, 1)),
        x.where(x > 0, random.uniform(0, 1)),
        x.clamp(max=random.uniform(0, 1)),
    )


@pytest.mark.parametrize(
    "function",
    [in_every_dtype, among_integers_and_bools, out_of_the_graph, several_and_integers, given_to_a_function],
    ids=lambda f: f.__name__,
)
def test_random_numbers_have_eagers_values_and_results_eagers_dtypes(function: Callable[[torch.Tensor], Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="ort_train")
    for seed in range(3):
        x = torch.randn(2, 3, requires_grad=True)
        random.seed(seed)
        expected = function(x)
        random.seed(seed)
        actual = compiled(x)
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            assert_close(mine, theirs, f"result {index}")
        gradients = (torch.autograd.grad(results[0].sum(), x)[0] for results in (actual, expected))
        assert_close(*gradients, "the gradient")
