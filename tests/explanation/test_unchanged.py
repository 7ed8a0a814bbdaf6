"""A dry run changes nothing of the program's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch
from explained import Mlp, broken
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ort_dynamo
from ort_dynamo import explain
from ort_dynamo.report.record import RECORDS


@pytest.mark.parametrize("measure", [False, True])
def test_tensors_and_gradients_are_as_before(measure: bool) -> None:
    model, x = Mlp(), torch.randn(3, 4, requires_grad=True)
    model.up.weight.grad = grad = torch.ones_like(model.up.weight)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    explain(model, x, measure=measure)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert model.up.weight.grad is grad
    assert torch.equal(grad, torch.ones_like(grad))
    assert x.grad is None
    assert model.down.weight.grad is None


def test_generators_are_as_before() -> None:
    def random_numbers() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())

    def seed() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    seed()
    expected = random_numbers()
    seed()

    @torch.compiler.disable
    def outside() -> None:
        random_numbers()

    def function(x: Tensor) -> Tensor:
        outside()
        return torch.nn.functional.dropout(x, 0.5)

    explain(function, torch.randn(4, generator=torch.Generator().manual_seed(0)))
    assert random_numbers() == expected


def test_tensors_that_a_function_writes_to_are_as_before() -> None:
    count = torch.zeros(())

    def function(x: Tensor) -> Tensor:
        count.add_(1)
        x.mul_(2)
        return x + count

    x = torch.ones(3)
    explain(function, x, measure=True)
    assert torch.equal(x, torch.ones(3))
    assert not count


def test_a_backward_of_the_function_itself_leaves_no_gradient() -> None:
    model = Mlp()

    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        return loss.detach()

    explain(step, torch.randn(3, 4))
    assert all(one.grad is None for one in model.parameters())


def test_a_function_that_runs_its_backward_may_return_its_loss() -> None:
    model = Mlp()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        loss.backward()
        return loss

    explained = explain(step, torch.randn(3, 4), measure=True)
    assert explained.graphs
    assert explained.measured is not None
    assert explained.measured.backward is None
    assert all(one.grad is None for one in model.parameters())


def test_a_module_compiled_in_place_stays_so() -> None:
    model = Mlp()
    model.compile(backend="ort_train")
    call = model._compiled_call_impl
    explain(model, torch.randn(3, 4))
    assert model._compiled_call_impl is call


def test_the_summary_is_as_before(fresh: Callable[[], str]) -> None:
    before = fresh()
    explain(broken, torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), measure=True)
    assert fresh() == before


@pytest.fixture
def fresh() -> Callable[[], str]:
    """Give the counters and the summary, as text."""
    torch.compile(Mlp(), backend="ort_train")(torch.randn(3, 4))
    return lambda: f"{ort_dynamo.summary()} {len(RECORDS)} {dict(counters)}"


def test_compiled_graphs_still_hit_and_stay_as_static_as_they_were() -> None:
    model = Mlp()
    compiled = torch.compile(model, backend="ort_train")
    compiled(torch.randn(3, 4))
    explain(compiled, torch.randn(3, 4))
    explain(compiled, torch.randn(5, 4))
    compiled(torch.randn(3, 4))
    assert len(RECORDS) == 1
    compiled(torch.randn(5, 4))
    assert len(RECORDS) == 2


def test_the_first_training_step_takes_the_sessions_of_the_explanation() -> None:
    model, x = Mlp(), torch.randn(3, 4)
    explain(model, x)
    torch.compile(model, backend="ort_train")(x).backward()
    found = ort_dynamo.summary()
    assert found.cache_hits == found.islands == 2


class Scaled(nn.Module):
    """Changes all that a module can have, in code that Dynamo leaves to eager mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.cache, self.last = 0, [], torch.zeros(2)

    @torch.compiler.disable
    def change(self, x: Tensor) -> None:
        with torch.no_grad():
            self.linear.weight.mul_(2)
            self.last.add_(1)
            x.add_(1)
        self.calls += 1
        self.cache.append(x)

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return self.linear(x)


def test_writes_by_eager_code_of_a_module_are_undone() -> None:
    model, x = Scaled(), torch.ones(3, 4)
    weight = model.linear.weight.detach().clone()
    for called in (model, lambda x: model(x)):
        explain(called, x)
        assert torch.equal(model.linear.weight, weight)
        assert (model.calls, model.cache, model.last.tolist(), x.max().item()) == (0, [], [0, 0], 1)


def test_a_step_that_reads_its_gradients_sees_and_keeps_them() -> None:
    model = Mlp()
    model(torch.randn(3, 4)).sum().backward()
    before = [(one.grad, one.grad.clone()) for one in model.parameters()]

    class Seen:
        gradients: ClassVar[list[Tensor]] = []  # a list that the step reads would be put back

    @torch.compiler.disable
    def look() -> None:
        Seen.gradients.append(model.up.weight.grad.clone())

    def step(x: Tensor) -> Tensor:
        look()
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    explain(step, torch.randn(3, 4))
    assert torch.equal(Seen.gradients[0], before[0][1])
    for one, (gradient, numbers) in zip(model.parameters(), before, strict=True):
        assert one.grad is gradient
        assert torch.equal(gradient, numbers)
