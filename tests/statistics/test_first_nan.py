"""The operators in which NaN and infinities begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from ort_dynamo import ValueStatistics, collect_statistics
from ort_dynamo.runtime.installed.capabilities import installed_runtime


@pytest.fixture
def fills_memory() -> Iterator[None]:
    """Have torch fill new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4))


def first_nan(compiled: Callable[..., Tensor], *args: Tensor, infinities: bool = True) -> ValueStatistics:
    with collect_statistics() as run:
        compiled(*args).sum().backward()
    found = run.first_nan(infinities=infinities)
    assert found is not None
    return found


class Divides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu() + 1
        hidden = hidden / (x - x)
        return self.last(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_the_division_is_named_that_gives_the_first_infinity(placement: str, dtype: torch.dtype) -> None:
    compiled = torch.compile(Divides().to(dtype), backend="ort_train", options={"placement": placement})
    found = first_nan(compiled, torch.randn(3, 4, dtype=dtype))
    assert (found.role, found.overload, found.module) == ("forward", "aten.div.Tensor", "")
    assert (found.begins, found.inf) == ("inf", 12)
    assert found.line.endswith("hidden = hidden / (x - x)")


def test_the_first_nan_may_be_behind_an_infinity() -> None:
    found = first_nan(torch.compile(Divides(), backend="ort_train"), torch.randn(3, 4), infinities=False)
    assert (found.overload, found.module, found.begins) == ("aten.addmm.default", "last (Linear)", "nan")


def test_nan_that_only_the_backward_has_is_found_there() -> None:
    def root(x: Tensor) -> Tensor:
        return (x * 0).sqrt() * 0

    compiled = torch.compile(root, backend="ort_train")
    x = torch.ones(3, requires_grad=True)
    found = first_nan(compiled, x)
    assert x.grad is not None
    assert x.grad.isnan().all()
    assert found.role == "backward"
    assert found.overload in ("aten.div.Tensor", "aten.mul.Tensor")  # 0 / (2 · 0), in whichever form
    assert "sqrt" in found.line


def test_an_infinity_that_the_program_wrote_does_not_count() -> None:
    def masked(x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, float("-inf")).softmax(-1)

    compiled = torch.compile(masked, backend="ort_train")
    x = torch.tensor([[-1.0, 2.0], [-3.0, -4.0]], requires_grad=True)
    with collect_statistics() as run:
        compiled(x).sum().backward()
    assert any(one.inf for one in run.statistics)
    assert run.first_nan() is None
    found = first_nan(compiled, torch.ones(2, 2, requires_grad=True))  # a row without a finite score
    assert (found.overload, found.begins, found.nan) == ("aten._softmax.default", "nan", 4)


@pytest.mark.parametrize("level", ["all", "disable"])
def test_operators_that_run_as_one_with_the_first_nan_are_named(level: str) -> None:
    def gelu(x: Tensor) -> Tensor:
        y = (x / 2**0.5).erf() + 1
        return x * y * 0.5  # -inf * 0

    compiled = torch.compile(gelu, backend="ort_train", options={"graph_optimization": level})
    with collect_statistics() as run:
        compiled(torch.full((4, 8), float("-inf")))
    found = run.first_nan()
    assert found is not None
    assert (found.overload, found.nan) == ("aten.mul.Tensor", 32)
    inside = {"aten.div.Tensor", "aten.erf.default", "aten.add.Tensor"}
    seen = {one.overload for one in run.statistics}
    assert {*found.fused} & inside == inside - seen
    fuses = level == "all" and installed_runtime().package != "onnxruntime-training"  # which leaves the pattern alone
    assert inside & seen == (set() if fuses else inside)


def test_an_input_with_nan_comes_first() -> None:
    compiled = torch.compile(mlp(), backend="ort_train")
    found = first_nan(compiled, torch.full((4, 8), float("nan")))
    assert (found.overload, found.begins, found.nan) == ("input", "nan", 32)


def test_a_gradient_that_comes_in_infinite_is_named() -> None:
    compiled = torch.compile(mlp(), backend="ort_train")
    with collect_statistics() as run:
        compiled(torch.randn(4, 8)).backward(torch.full((4, 4), float("inf")))
    found = run.first_nan()
    assert found is not None
    assert (found.role, found.overload, found.begins) == ("backward", "input", "inf")


@pytest.mark.usefixtures("fills_memory")
@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_nothing_begins_in_memory_that_the_program_fills(placement: str) -> None:
    def sampled(x: Tensor, w: Tensor) -> Tensor:
        table = x.new_empty(4, 8).t()
        table[:3] = x.sum()
        table[3:] = 1
        return torch.nn.functional.gumbel_softmax(x @ w) @ table.t()

    compiled = torch.compile(sampled, backend="ort_train", options={"placement": placement})
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    with collect_statistics() as run:
        compiled(x, w).sum().backward()
    assert any("exponential" in one.overload for one in run.statistics)
    assert [one.overload for one in run.statistics if one.nan] == []
    assert run.first_nan() is None


class Apart(nn.Module):
    """Has its NaN begin in `a`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Logarithm(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (-x.abs() - 1).log()


@pytest.mark.parametrize(("modules", "name"), [(None, "aten.log.default"), ("a", "aten.log.default"), ("b", "")])
def test_nan_that_flows_into_the_wanted_modules_does_not_begin_there(modules: str | None, name: str) -> None:
    compiled = torch.compile(Apart(), backend="ort_train")
    with collect_statistics(modules=modules) as run:
        compiled(torch.randn(3, 4))
    assert any(one.nan for one in run.statistics)
    found = run.first_nan()
    assert (found.overload if found else "") == name
