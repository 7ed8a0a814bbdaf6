"""Times of single operators under ort_train, in units of eager's.

Tensors have about a million elements, where kernels dominate, or about a thousand, where overhead does (`add` shows the
overhead alone). Measured are the forward under no_grad, and the forward with gradient. The tables begin with the
slowest operator. Inductor is left out: it would compile C++ for minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.contestants import SUBJECT, compile_with
from bench.operators import OPERATORS, Operator
from bench.results import Compare
from bench.workloads import Size

_ROUNDS = {"tiny": 2, "small": 12, "medium": 24}

_ELEMENTS = {"million": 1_000_000, "thousand": 1_024}

_CALLS = {"million": 2, "thousand": 50}

_TINY = ("add", "hardtanh", "embedding", "sort")


@pytest.mark.parametrize("elements", _ELEMENTS)
@pytest.mark.parametrize("call", ["forward", "gradient"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_operator(operator: str, call: str, elements: str, size: Size, compare: Compare) -> None:
    if size == "tiny" and operator not in _TINY:
        pytest.skip(f"of the operators, only {', '.join(_TINY)}")
    chosen = OPERATORS[operator]
    if call == "gradient" and not chosen.gradient:
        pytest.skip("has no gradient")
    torch.manual_seed(0)
    run = {"forward": _forward, "gradient": _forward_and_gradient}[call]
    inputs = chosen.inputs(_ELEMENTS[elements])
    results = {backend: run(chosen, backend, inputs) for backend in ("eager", SUBJECT)}
    # Whoever computes something else is not to be compared.
    torch.testing.assert_close(results[SUBJECT](), results["eager"](), rtol=1e-3, atol=1e-3)
    calls = 1 if size == "tiny" else _CALLS[elements]
    contestants = {backend: _repeated(result, calls) for backend, result in results.items()}
    compare(f"{elements} elements, {call}", operator, contestants, _ROUNDS[size], calls, worst_first=True)


def _repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(calls):
            function()

    return repeat


def _forward(operator: Operator, backend: str, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    function = compile_with(backend, operator.function)

    def call() -> Tensor:
        with torch.no_grad():
            return _first(function(*inputs))  # not the indices, which differ where entries are equal

    return call


def _forward_and_gradient(operator: Operator, backend: str, inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    function = compile_with(backend, operator.function)
    inputs = tuple(x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    with torch.no_grad():
        weight = torch.randn_like(_first(operator.function(*inputs)), generator=torch.Generator().manual_seed(1))
    wanted = [x for x in inputs if x.requires_grad]

    def call() -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(_first(function(*inputs)), wanted, weight, allow_unused=True)

    return call


def _first(result: Any) -> Tensor:
    first: Tensor = result if isinstance(result, Tensor) else result[0]
    return first
