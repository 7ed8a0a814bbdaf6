"""A program's state is as it was after a step that ran for another purpose."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ort_dynamo.program.program_state import generators, unchanged
from ort_dynamo.program.read_objects import read_by


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.by_layer, self.counts, self.scale = [[torch.zeros(2)]], defaultdict(int), torch.ones(2)
        self.order = OrderedDict(a=[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(2)
        self.scale.data.mul_(3)
        self.by_layer[0][0].add_(1)
        self.by_layer[0].append(x)
        self.counts["calls"] += 1
        self.order["a"].append(2)
        return x * self.weight


def test_nested_containers_and_writes_through_data_are_put_back() -> None:
    model = Cached()
    inner = model.by_layer[0]
    with unchanged([model]):
        model(torch.ones(2))
        assert model.counts
    assert model.by_layer[0] is inner
    assert len(inner) == 1
    assert torch.equal(inner[0], torch.zeros(2))
    assert torch.equal(model.scale, torch.ones(2))
    assert torch.equal(model.weight, torch.ones(2))
    assert (dict(model.counts), model.order["a"]) == ({}, [1])


def test_a_step_sees_the_gradient_and_does_not_change_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = gradient = torch.full((2,), 2.0)
    for change in (torch.Tensor.zero_, lambda seen: seen.add_(1)):
        with unchanged([weight]):
            assert torch.equal(weight.grad, gradient)
            change(weight.grad)
            (weight * 3).sum().backward()
        assert weight.grad is gradient
        assert torch.equal(gradient, torch.full((2,), 2.0))


def test_a_pending_backward_still_runs() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    with unchanged([weight]):
        weight.sum()
    loss.backward()
    assert torch.equal(weight.grad, torch.full((2,), 2.0))


def test_an_inference_tensor_is_put_back() -> None:
    with torch.inference_mode():
        kept = torch.zeros(2)
    with unchanged([kept]), torch.inference_mode():
        kept.add_(1)
    assert torch.equal(kept, torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.uint16])
def test_tensors_of_any_dtype_are_restored(dtype: torch.dtype) -> None:
    kept = torch.zeros(2).to(dtype)
    with unchanged([kept]):
        kept.data.fill_(True)
    assert not kept.to(torch.complex64).any()


def test_an_optimizer_that_a_function_names_is_put_back() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step(torch.ones(2))
    before = {name: one.clone() for name, one in optimizer.state[model.weight].items()}
    weight, gradient = model.weight.detach().clone(), model.weight.grad
    assert set(read_by(step)) >= {"model", "optimizer"}
    with unchanged(read_by(step).values()):
        step(torch.full((2,), 5.0))
    assert all(torch.equal(one, before[name]) for name, one in optimizer.state[model.weight].items())
    assert torch.equal(model.weight, weight)
    assert model.weight.grad is gradient


def test_a_lazy_module_gets_its_shapes_for_good() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with unchanged([model]):
        model(torch.ones(1, 3))
    assert model(torch.ones(1, 3)).shape == (1, 2)


def test_all_generators_are_restored() -> None:
    def random_numbers() -> tuple[Any, ...]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    with generators():
        expected = random_numbers()
    assert random_numbers() == expected
