"""The overhead of one call of a tiny graph, and of each further input.

The graph has three operators on 4×4 matrices for any number of inputs: the arithmetic takes next to no time.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.contestants import compile_with
from bench.results import Compare
from bench.workloads import Size

_ROUNDS = {"tiny": 6, "small": 30, "medium": 60}

_CALLS = {"tiny": 1_000, "small": 20_000, "medium": 20_000}  # shared out: fewer calls where a call takes longer


@pytest.mark.parametrize("inputs", [2, 20, 200])
@pytest.mark.parametrize("call", ["forward", "forward and backward"])
def test_call_overhead(call: str, inputs: int, size: Size, backends: tuple[str, ...], compare: Compare) -> None:
    run = {"forward": _run_forward, "forward and backward": _run_forward_and_backward}[call]
    torch.manual_seed(0)
    matrices = [torch.randn(4, 4, requires_grad=True) for _ in range(inputs)]
    calls = _CALLS[size] // (20 + inputs)

    def repeat(function: Callable[..., Tensor]) -> None:
        for _ in range(calls):
            run(function, matrices)

    def contestant(backend: str) -> Callable[[], None]:
        function = compile_with(backend, _tiny_graph)
        repeat(function)
        return lambda: repeat(function)

    contestants = {backend: contestant(backend) for backend in backends}
    compare("call overhead", f"{call}, {inputs} inputs", contestants, _ROUNDS[size], calls)


def _tiny_graph(*matrices: Tensor) -> Tensor:
    return (torch.tanh(torch.cat(matrices)) @ matrices[0]).sum()


def _run_forward(function: Callable[..., Tensor], matrices: list[Tensor]) -> None:
    with torch.no_grad():
        function(*matrices)


def _run_forward_and_backward(function: Callable[..., Tensor], matrices: list[Tensor]) -> None:
    torch.autograd.grad(function(*matrices), matrices)
