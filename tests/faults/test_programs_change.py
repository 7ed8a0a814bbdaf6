"""A program replaces weights and modules, resets Dynamo or deletes a model between the calls of a compiled one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_dynamo.cache.memory import MAX_ENTRIES
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.training.ortmodule import ORTModule


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)) * self.scale).square().sum()


def gradients(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss = run(torch.linspace(-1, 1, 12).view(3, 4).to(next(model.parameters()).dtype))
    loss.backward()
    return [loss.detach(), *(None if one.grad is None else one.grad.clone() for one in model.parameters())]


def replace_data(model: Model) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.flip(0).contiguous() * 2
    model.scale = torch.full((6,), 0.5)


def replace_layout(model: Model) -> None:
    model.up.weight.data = model.up.weight.data.t().contiguous().t()  # the same values in another layout


def assign_state(model: Model) -> None:
    model.load_state_dict({name: value * 3 for name, value in model.state_dict().items()}, assign=True)


def swap_module(model: Model) -> None:
    model.up = nn.Linear(4, 6, bias=False)


def wrap_module(model: Model) -> None:
    model.down = nn.Sequential(model.down, nn.Tanh())  # type: ignore[assignment]


def double(model: Model) -> None:
    model.double()


def double_by_swaps(model: Model) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def freeze(model: Model) -> None:
    model.up.requires_grad_(False)


def swap_tensors(model: Model) -> None:
    torch.utils.swap_tensors(model.up.weight, nn.Parameter(torch.full((6, 4), 0.25)))


CHANGES = [
    replace_data,
    replace_layout,
    assign_state,
    swap_module,
    wrap_module,
    double,
    double_by_swaps,
    freeze,
    swap_tensors,
]


def by_compile(model: Model) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(model, backend="ort_train")


@pytest.mark.parametrize("wrap", [by_compile, ORTModule], ids=["compile", "ORTModule"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_the_next_step_has_the_new_weights(
    change: Callable[[Model], None], wrap: Callable[[Model], Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    model = Model()
    compiled = wrap(model)
    torch.testing.assert_close(gradients(compiled, model), gradients(model, model))
    change(model)
    torch.testing.assert_close(gradients(compiled, model), gradients(model, model))


def test_weights_replaced_between_forward_and_backward_are_those_of_torchs_own_backend() -> None:
    found = []
    for backend in ("aot_eager", "ort_train"):  # in eager mode some operators save a view of the old weight
        torch.manual_seed(0)
        model = Model()
        loss = torch.compile(model, backend=backend)(torch.linspace(-1, 1, 12).view(3, 4))
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 0.5)
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*found)


def test_a_reset_between_forward_and_backward() -> None:
    model = Model()
    expected = gradients(model, model)
    compiled = torch.compile(model, backend="ort_train")
    model.zero_grad()
    loss = compiled(torch.linspace(-1, 1, 12).view(3, 4))
    torch._dynamo.reset()
    gc.collect()
    assert len(CACHE) == 0
    loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected[1:])
    torch.testing.assert_close(gradients(compiled, model), expected)


def test_a_model_deleted_before_its_backward_and_while_its_graphs_are_cached() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
    (expected,) = torch.autograd.grad(model(x), x)
    loss = torch.compile(model, backend="ort_train")(x)
    gone = weakref.ref(model.up.weight)
    del model
    gc.collect()
    loss.backward()
    torch.testing.assert_close(x.grad, expected)
    del loss
    gc.collect()
    assert gone() is None  # neither the cache nor a session holds a weight
    cached = len(CACHE)
    assert cached
    torch.manual_seed(0)
    model = Model()
    x.grad = None
    torch.compile(model, backend="ort_train")(x).backward()
    torch.testing.assert_close(x.grad, expected)
    assert len(CACHE) == cached


@pytest.mark.parametrize("count", [12, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_recompiles(count: int) -> None:
    config = {"recompile_limit": count + 1, "accumulated_recompile_limit": count + 1}
    with torch._dynamo.config.patch(config):
        compiled = torch.compile(lambda x, n: (x * n).cos() + n, backend="ort_train", dynamic=False)
        x = torch.ones(3)
        for number in range(count):
            torch.testing.assert_close(compiled(x, number), (x * number).cos() + number)
            assert len(CACHE) <= MAX_ENTRIES
        assert len(CACHE) == min(count, MAX_ENTRIES)
        torch.testing.assert_close(compiled(x, 0), x.mul(0).cos())  # evicted, and still alive in Dynamo's cache
