"""Numbers that become elements of a result: torch's kernels check that the dtype holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

OPERATORS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "clamp": lambda x, number: x.clamp(max=number),
    "clamp_min": lambda x, number: x.clamp(min=number),
    "full_like": torch.full_like,
    "masked_fill": lambda x, number: x.masked_fill(x > 1, number),
    "where": lambda x, number: torch.where(x > 1, x, number),
    "pad": lambda x, number: torch.nn.functional.pad(x, (1, 1), value=number),
    "index_fill": lambda x, number: x.index_fill(0, torch.tensor([1]), number),
    "scatter": lambda x, number: x.scatter(0, torch.tensor([1]), number),
    "threshold": lambda x, number: torch.nn.functional.threshold(x, 1, number),
    "pow": lambda x, number: x**number,
}

FLOAT_OPERATORS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "add, alpha": lambda x, number: torch.add(x, x, alpha=number),
    "addmm, alpha": lambda x, number: torch.addmm(x, x, x, alpha=number),
    "addmm, beta": lambda x, number: torch.addmm(x, x, x, beta=number),
    "addr": lambda x, number: torch.addr(x, x[0], x[1], beta=number),
    "baddbmm, alpha": lambda x, number: torch.baddbmm(x[None], x[None], x[None], alpha=number),
    "celu": torch.nn.functional.celu,
    "elu": torch.nn.functional.elu,
    "hardshrink": torch.nn.functional.hardshrink,
    "index_add": lambda x, number: x.index_add(0, torch.tensor([0]), x[:1], alpha=number),
    "isin": lambda x, number: torch.isin(number, x),
    "leaky_relu": torch.nn.functional.leaky_relu,
    "linspace": lambda x, number: torch.linspace(0, number, 3, dtype=x.dtype),
    "logit": torch.logit,
    "nan_to_num": lambda x, number: torch.nan_to_num(x, nan=number),
    "pow": lambda x, number: x**number,
    "softplus": lambda x, number: torch.nn.functional.softplus(x, threshold=number),
    "xlogy": torch.xlogy,
    "xlogy of a number": lambda x, number: torch.xlogy(number, x),
}


def assert_same(function: Callable[[Tensor, Any], Tensor], compiled: Any, x: Tensor, number: float) -> None:
    """Check that both give the same, or that both refuse the number; while it traces, torch has errors of its own."""
    try:
        expected = function(x, number)
    except RuntimeError:
        with pytest.raises(RuntimeError, match=r"overflow|outside the representable range|powers|fake tensor call"):
            compiled(x, number)
    else:
        torch.testing.assert_close(compiled(x, number), expected, equal_nan=True)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_a_symbolic_number_that_does_not_fit_is_refused_as_in_eager(name: str, dtype: torch.dtype) -> None:
    function = OPERATORS[name]
    compiled = torch.compile(function, backend="ort_train", dynamic=True)
    x = torch.tensor([0, 1, 100]).to(dtype)
    for number in (7, 9, -3, 300, 70000, 2**35):
        assert_same(function, compiled, x, number)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "pow"])
@pytest.mark.parametrize(("dtype", "number"), [(torch.float16, 70000), (torch.uint8, -5), (torch.uint8, 300)])
def test_a_constant_that_does_not_fit_is_refused_as_in_eager(name: str, dtype: torch.dtype, number: int) -> None:
    function, x = OPERATORS[name], torch.tensor([0, 1, 100]).to(dtype)
    assert_same(function, torch.compile(function, backend="ort_train"), x, number)


@pytest.mark.parametrize("name", FLOAT_OPERATORS)
@pytest.mark.parametrize(
    ("dtype", "number"),
    [(torch.float32, 1e300), (torch.float16, 1e300), (torch.float16, 70000.0), (torch.float64, 1e300)],
)
def test_a_factor_or_limit_that_does_not_fit_does_as_in_eager(name: str, dtype: torch.dtype, number: float) -> None:
    function, x = FLOAT_OPERATORS[name], torch.tensor([[1.0, 4.0], [0.5, 1.0]]).to(dtype)
    assert_same(function, torch.compile(function, backend="ort_train"), x, number)


@pytest.mark.parametrize("alpha", [1e-300, float("inf")])
@pytest.mark.parametrize("name", ["celu", "leaky_relu"])
def test_zero_times_a_slope_without_an_inverse_is_as_in_eager(name: str, alpha: float) -> None:
    function, x = FLOAT_OPERATORS[name], torch.tensor([0.0, 1.0])
    compiled = torch.compile(lambda x, number: function(x, number).isnan(), backend="ort_train")
    assert_same(lambda x, number: function(x, number).isnan(), compiled, x, alpha)


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "pow"])
def test_an_infinite_constant_is_lowered(name: str) -> None:
    function, x = OPERATORS[name], torch.tensor([0.0, 1.0, 100.0]).half()
    compiled = torch.compile(function, backend="ort_train", options={"fallback": "error"})
    assert_same(function, compiled, x, float("inf"))


def test_a_symbolic_number_of_a_known_range_is_lowered() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        torch._check(x.shape[0] < 1000)
        n = x.shape[0]
        return torch.full_like(x, n), x.clamp(max=n), x.long() ** n, x.half().masked_fill(x > 1, n)

    run = torch.compile(function, backend="ort_train", dynamic=True, options={"fallback": "error"})
    for size in (5, 7):
        x = torch.arange(size, dtype=torch.int32)
        torch.testing.assert_close(run(x), function(x), rtol=0, atol=0)


def test_a_limit_beyond_the_dtype_is_none() -> None:
    run = torch.compile(lambda x: torch.nn.functional.threshold(x, -1e5, 1.0), backend="ort_train")
    x = torch.randn(4).half()
    assert torch.equal(run(x), x)


def test_an_integer_to_a_symbolic_negative_power_is_refused_as_in_eager() -> None:
    function, x = OPERATORS["pow"], torch.arange(4)
    compiled = torch.compile(function, backend="ort_train", dynamic=True)
    for power in (2, 5, -2):
        assert_same(function, compiled, x, power)


@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_number_is_in_a_tensor_whose_dtype_rounds_it_as_in_eager(dtype: torch.dtype, size: int) -> None:
    def function(x: Tensor, number: float) -> Tensor:
        return torch.isin(number, x)

    x = torch.linspace(0, 1, size, dtype=dtype).index_fill(0, torch.tensor([1]), 0.3)
    assert_same(function, torch.compile(function, backend="ort_train"), x, 0.3)
