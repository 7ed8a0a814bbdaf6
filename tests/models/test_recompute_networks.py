"""Tests of recomputation in random networks: gradients are equal, bit by bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ort_dynamo import memory_plan
from ort_dynamo.testing import eager_reasons, observe

WIDTH = 6

Step = Callable[[Tensor, Tensor, nn.Module], Tensor]

STEPS: dict[str, Step] = {
    "product": lambda x, first, own: x @ own.weight,
    "layer": lambda x, first, own: F.linear(x, own.weight, own.bias),
    "gelu": lambda x, first, own: F.gelu(x),
    "tanh": lambda x, first, own: torch.tanh(x),
    "sigmoid": lambda x, first, own: torch.sigmoid(x) * x,
    "softmax": lambda x, first, own: torch.softmax(x, -1),
    "layer norm": lambda x, first, own: F.layer_norm(x, (WIDTH,), own.bias),
    "batch norm": lambda x, first, own: F.batch_norm(x, own.mean, own.variance, own.bias, training=True),
    "transpose": lambda x, first, own: x.t().reshape(-1, WIDTH) if x.shape[0] == WIDTH else x.flip(0),
    "residual": lambda x, first, own: x + first,
    "gate": lambda x, first, own: x * first.cos(),
    # All kinds of random ops: masks, noise of a shape, a given probability, fused and in elementary operators.
    "dropout": lambda x, first, own: F.dropout(x, 0.4),
    "uniform noise": lambda x, first, own: x + 0.1 * torch.rand_like(x),
    "normal noise": lambda x, first, own: x * (1 + 0.1 * torch.randn(x.shape)),
    "bernoulli": lambda x, first, own: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "random choice": lambda x, first, own: torch.where(torch.rand_like(x) < 0.5, x, x.sin()),
    "randomized relu": lambda x, first, own: F.rrelu(x, training=True),
}


class Own(nn.Module):
    """The parameters and buffers that a step may own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))


class Network(nn.Module):
    """Steps in a row; those from `start` to `stop` are checkpointed."""

    def __init__(self, steps: list[str], start: int, stop: int) -> None:
        super().__init__()
        self.steps = steps
        self.own = nn.ModuleList(Own() for _ in steps)
        self.start, self.stop = start, stop

    def __repr__(self) -> str:
        return f"Network({self.steps}, {self.start}, {self.stop})"

    def forward(self, x: Tensor) -> Tensor:
        first = x = torch.tanh(x)
        x = self.run(x, first, 0, self.start)
        if self.start < self.stop:
            x = checkpoint(self.run, x, first, self.start, self.stop, use_reentrant=False)
        return self.run(x, first, self.stop, len(self.steps)).square().mean()

    def run(self, x: Tensor, first: Tensor, start: int, stop: int) -> Tensor:
        for i in range(start, stop):
            x = STEPS[self.steps[i]](x, first, self.own[i])
        return x


@st.composite
def networks(draw: st.DrawFn) -> Network:
    steps = draw(st.lists(st.sampled_from(sorted(STEPS)), min_size=3, max_size=9))
    start = draw(st.integers(0, len(steps)))
    stop = draw(st.integers(0, len(steps)))
    torch.manual_seed(0)
    return Network(["layer", *steps, "layer"], start, stop)


def observed(network: Network, x: Tensor, **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    return observe(
        network, (x,), 0, compile_=lambda f: torch.compile(f, backend="ort_train", options=options, fullgraph=True)
    )


@settings(max_examples=12, derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(Network(["layer", "transpose", "batch norm", "transpose", "layer"], 0, 0), 5, Random(0))
@given(networks(), st.integers(1, 10), st.randoms(use_true_random=False))
def test_a_budget_and_plans_change_no_bit_of_any_gradient(network: Network, tenths: int, random: Any) -> None:
    x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected = observed(network, x)
    event(f"{len(eager_reasons())} kinds of nodes in eager")
    plans = [str(row.plan) for graph in memory_plan(network, x).graphs for row in graph.rows]
    chosen = random.sample(plans, len(plans) // 2)
    for options in ({"memory_budget": 0.0}, {"memory_budget": tenths / 10}, {"recompute_plan": chosen}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            actual = observed(network, x, **options)
        assert actual.keys() == expected.keys()
        assert any(what.startswith("gradient of parameter") for what in expected)
        for what, value in expected.items():
            same = actual[what] is None if value is None else torch.equal(actual[what], value)
            assert same, f"{options}: {what} differs"
