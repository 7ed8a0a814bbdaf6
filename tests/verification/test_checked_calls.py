"""The option verify checks a call without an effect on the program, and calls no right result wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ort_dynamo
from ort_dynamo.errors import InvalidArgumentError, ResultsDifferError

aten = torch.ops.aten


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, backend="ort_train", options={"verify": 2})
    return compiled


def as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@pytest.fixture
def checks(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """Give a function that counts the calls that were checked and equal."""
    caplog.set_level("INFO", logger="ort_dynamo.verification")
    return lambda: sum("Equal to eager mode" in record.getMessage() for record in caplog.records)


# -- tensors that the graph holds ------------------------------------------------------------------------------------


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1))


def weights_after(
    steps: int, optimizer: Callable[[Any], torch.optim.Optimizer], compiled: Callable[..., Any]
) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    update = optimizer(model.parameters())
    step = compiled(update.step)
    for _ in range(steps):
        update.zero_grad()
        model(torch.randn(3, 2)).square().mean().backward()
        step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_a_compiled_optimizer_updates_once_a_call(
    optimizer: Callable[[Any], torch.optim.Optimizer], checks: Callable[[], int]
) -> None:
    expected = weights_after(3, optimizer, as_is)
    torch.testing.assert_close(weights_after(3, optimizer, checked), expected)
    assert checks() >= 2


def test_a_function_of_a_whole_step_trains_as_without_the_option(checks: Callable[[], int]) -> None:
    def losses(compiled: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = sgd(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = compiled(step)
        return [run(torch.randn(5, 4)).item() for _ in range(4)]

    expected = losses(as_is)
    assert losses(checked) == pytest.approx(expected, rel=1e-5)
    assert checks() >= 2


def test_a_wrong_update_of_a_parameter_raises_and_is_not_applied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    @ort_dynamo.register_lowering(aten.add.Tensor, replace=True)
    def wrong_add(ctx: Any, x: Any, y: Any, alpha: float = 1) -> Any:
        return ctx.op.Add(x, y)

    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.grad = gradient = torch.ones(64)
    with pytest.raises(ResultsDifferError, match=r"attribute .*param.* after"):
        checked(optimizer.step)()
    assert torch.equal(weight, torch.ones(64))
    assert weight.grad is gradient


# -- inputs ----------------------------------------------------------------------------------------------------------


def gradient_of_a_block(compiled: Callable[..., Any], *layers: nn.Module) -> torch.Tensor:
    torch.manual_seed(0)
    first, block = nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), *layers)
    compiled(block)(first(torch.randn(3, 4))).sum().backward()
    assert first.weight.grad is not None
    return first.weight.grad


def test_a_block_may_begin_with_an_activation_in_place(checks: Callable[[], int]) -> None:
    torch.testing.assert_close(gradient_of_a_block(checked), gradient_of_a_block(as_is))
    assert checks() == 1


def test_the_gradient_of_an_input_that_is_written_to_is_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    @ort_dynamo.register_lowering(aten.tanh_backward.default, replace=True)
    def wrong(ctx: Any, gradient: Any, result: Any) -> Any:
        return ctx.op.Mul(gradient, ctx.op.Sub(1.0, result))

    with pytest.raises(ResultsDifferError, match="gradient of input"):
        gradient_of_a_block(checked, nn.Tanh())


def test_a_write_after_a_graph_break_is_checked(checks: Callable[[], int]) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            torch._dynamo.graph_break()
            h += x
            return self.second(torch.relu_(h)).sum()

    model, x = Broken(), torch.randn(3, 4)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    found = torch.autograd.grad(checked(model)(x), list(model.parameters()))
    torch.testing.assert_close(found, expected)
    assert checks() == 2


@pytest.mark.parametrize("with_gradient", [False, True])
def test_inputs_that_overlap_still_overlap_in_the_check(with_gradient: bool, checks: Callable[[], int]) -> None:
    def write(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return (a.sum() * b).sum()

    def run(function: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        leaf = torch.arange(10.0, requires_grad=with_gradient)
        base = leaf * 1
        result = function(base[:6], base[4:])
        if with_gradient:
            result.backward()
        return base.detach(), leaf.grad

    torch.testing.assert_close(run(checked(write)), run(write))
    assert checks() == 1


def test_compiled_autograd_is_checked(checks: Callable[[], int]) -> None:
    model, x = nn.Linear(4, 2), torch.ones(3, 4)
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = checked(lambda x: model(x).square().sum().backward())
        for _ in range(3):
            step(x)
    found = model.weight.grad
    model.weight.grad = None
    (3 * model(x).square().sum()).backward()
    torch.testing.assert_close(found, model.weight.grad)
    assert checks() >= 2


def test_a_call_with_nested_tensors_runs_unchecked_with_a_warning() -> None:
    model = nn.Linear(4, 3)
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(5, 4)], layout=torch.jagged)
    with pytest.warns(UserWarning, match="leaves a call unchecked: it has nested tensors"):
        found = checked(model)(nested)
    torch.testing.assert_close(found.values(), model(nested).values())
    with pytest.raises(InvalidArgumentError, match="nested tensors"):
        ort_dynamo.verify(model, nested)


def test_a_graph_whose_own_tensor_is_an_input_too_runs_unchecked_with_a_warning() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.grad = weight.detach()
    with pytest.warns(UserWarning, match="leaves a call unchecked: an input shares memory"):
        checked(optimizer.step)()
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.9))


def test_a_gradient_of_zeros_may_stand_for_none() -> None:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), x.square().mean()

    x = torch.randn(3, 4, requires_grad=True)
    _, metric = checked(Metric())(x)
    assert not math.isnan(metric.item())
    assert ort_dynamo.verify(Metric(), x).ok
