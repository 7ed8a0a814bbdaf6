"""autograd.Functions that write to an input in their backward: the forward's value is seen first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ort_dynamo.capture.input_writes import keeps_input_writes
from ort_dynamo.testing import assert_close


def by_method(x: torch.Tensor, gradient: torch.Tensor) -> None:
    x.add_(gradient)


def by_operator(x: torch.Tensor, gradient: torch.Tensor) -> None:
    x *= gradient


def by_index(x: torch.Tensor, gradient: torch.Tensor) -> None:
    x[0] = gradient[1]


def by_out(x: torch.Tensor, gradient: torch.Tensor) -> None:
    torch.mul(gradient, 3, out=x)


def by_overload(x: torch.Tensor, gradient: torch.Tensor) -> None:
    torch.ops.aten.sub_.Tensor(x, gradient)


def by_packet(x: torch.Tensor, gradient: torch.Tensor) -> None:
    torch.ops.aten.mul_(x, gradient)


def not_at_all(x: torch.Tensor, gradient: torch.Tensor) -> None:
    (x + gradient).sin()


WRITES = [by_method, by_operator, by_index, by_out, by_overload, by_packet, not_at_all]


def counting(write: Callable[[torch.Tensor, torch.Tensor], None], forward_writes: bool) -> Callable[..., Any]:
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            if forward_writes:
                count.add_(1)
            ctx.count = count
            return x.exp()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            write(ctx.count, gradients[0])
            return gradients[0] * 2, None

    def function(x: torch.Tensor, count: torch.Tensor) -> Any:
        return Counting.apply(x.sin(), count) * count.shape[0]  # type: ignore[no-untyped-call]

    return function


@pytest.mark.parametrize("forward_writes", [True, False])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_input_holds_the_writes_of_the_forward_and_of_the_backward(
    write: Callable[[torch.Tensor, torch.Tensor], None], forward_writes: bool
) -> None:
    function = counting(write, forward_writes)
    torch._dynamo.reset()
    seen = []
    for run in (function, torch.compile(function, backend="ort_train", fullgraph=True)):
        x = torch.linspace(-1, 1, 3).requires_grad_()
        count = torch.linspace(0, 1, 3)
        y = run(x, count)
        after_forward = count.clone()
        y.sum().backward()
        seen.append((y.detach(), after_forward, count, x.grad))
    for what, mine, theirs in zip(("result", "after forward", "after backward", "gradient"), *seen[::-1], strict=True):
        assert_close(mine, theirs, what)


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_only_a_backward_that_writes_keeps_writes_in_the_graph(
    write: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    kept = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Any:
        kept.append(keeps_input_writes(gm))
        return gm

    torch._dynamo.reset()
    torch.compile(counting(write, True), backend=look, fullgraph=True)(torch.ones(3).requires_grad_(), torch.ones(3))
    assert kept == [write is not not_at_all]
