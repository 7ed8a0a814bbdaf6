"""Sums over duplicate indices are the same in every run, on sessions with several threads.

ScatterND(reduction="add") of both tested runtimes is a data race there; these tests pin the way around it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from ort_dynamo.testing import assert_like_eager

INDEX = torch.randint(0, 7, (4096,))
VALUES = torch.randn(4096, 33)


def embedding(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return F.embedding(INDEX, table) * values


def index_put(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return table.index_put((INDEX,), values, accumulate=True)


def index_add(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return table.index_add(0, INDEX, values)


def scatter_add(table: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return table.scatter_add(0, INDEX[:, None].expand_as(values), values)


@pytest.mark.parametrize("function", [embedding, index_put, index_add, scatter_add])
def test_duplicates_are_summed_rightly_and_always_the_same(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    table = torch.randn(7, 33, requires_grad=True)
    values = VALUES.clone().requires_grad_()
    assert_like_eager(function, table, values, options={"threads": 2})
    compiled = torch.compile(function, backend="ort_train", options={"threads": 2})
    results = []
    for _ in range(20):
        output = compiled(table, values)
        results.append((output.detach(), torch.autograd.grad(output.square().sum(), table)[0]))
    for output, gradient in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(gradient, results[0][1])
