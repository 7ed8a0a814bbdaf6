"""A step is observed by name, and leaves everything as it was."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ort_dynamo import register_lowering, verify
from ort_dynamo.program.read_objects import modules_among, read_by
from ort_dynamo.verification.step import Step


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2))
        self.calls, self.last, self.kept, self.names = [1], deque([1], maxlen=3), {"a": 1}, {"x"}

    def forward(self, x: torch.Tensor, y: Any = None) -> Any:
        with torch.no_grad():
            self.seen += 1
            self.weight += 1
        self.calls.append(2)
        self.last.append(2)
        self.kept["b"] = 2
        self.names.add("y")
        self.new = x
        random.random(), np.random.rand(), torch.rand(1)
        return {"loss": (x * self.weight).sum(), "all": [x + self.seen, y]}


def test_all_that_can_be_seen_has_a_name() -> None:
    model, x = Stateful(), torch.ones(2, requires_grad=True)
    seen = Step((x,), {"y": torch.zeros(1)}, {"": model}).observe(model)
    assert list(seen) == [
        "output loss",
        "output all[0]",
        "output all[1]",
        "gradient of input 0",
        "gradient of parameter weight",
        "buffer seen",
        "input 0 after",
        "input y after",
    ]
    assert torch.equal(seen["gradient of input 0"], torch.full((2,), 2.0))
    assert torch.equal(seen["buffer seen"], torch.ones(2))


def test_state_is_put_back_even_after_an_error() -> None:
    model, x = Stateful(), torch.ones(2)
    model.weight.grad = gradient = torch.zeros(2)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    def fails(x: torch.Tensor) -> None:
        model(x)
        model.weight.grad = torch.ones(2)
        raise ValueError("after the step")

    with pytest.raises(ValueError, match="after the step"):
        Step((x,), {}, {"": model}).observe(fails)
    assert (model.calls, model.last, model.kept, model.names) == ([1], deque([1]), {"a": 1}, {"x"})
    assert not hasattr(model, "new")
    assert torch.equal(model.weight, torch.ones(2))
    assert torch.equal(model.seen, torch.zeros(2))
    assert model.weight.grad is gradient
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_an_input_that_is_given_twice_is_one_tensor() -> None:
    x = torch.ones(2)

    def same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 1

    seen = Step((x, x)).observe(same)
    assert torch.equal(seen["output 0"], torch.full((2,), 2.0))
    assert torch.equal(x, torch.ones(2))


def test_random_gradients_are_the_same_in_each_run() -> None:
    model, step = nn.Linear(3, 3), Step((torch.randn(2, 3),))
    step = Step(step.args, {}, {"": model})
    one, other = step.observe(model), step.observe(model)
    assert all(torch.equal(one[name], other[name]) for name in one)
    with torch.no_grad():
        assert not any(name.startswith("gradient") for name in step.observe(model))


@pytest.mark.parametrize("detached", [False, True])
def test_the_gradients_of_a_backward_of_the_call_itself_are_the_steps(detached: bool) -> None:
    model = nn.Linear(2, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach() if detached else loss

    x = torch.ones(3, 2)
    seen = Step((x,), {}, {"": model}).observe(step)
    expected = torch.autograd.grad(model(x).square().sum(), model.weight)[0]
    torch.testing.assert_close(seen["gradient of parameter weight"], expected)
    assert model.weight.grad is None
    assert verify(step, x).ok


def test_a_wrong_gradient_of_a_backward_of_the_call_itself_is_found(tmp_path: Path) -> None:
    @register_lowering(torch.ops.aten.tanh_backward.default, replace=True)
    def wrong(ctx: Any, gradient: Any, result: Any) -> Any:
        return ctx.op.Mul(gradient, ctx.op.Sub(1.0, result))

    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).tanh().sum()
        loss.backward()
        return loss

    result = verify(step, torch.randn(3, 4), folder=tmp_path)
    assert "gradient of parameter model.weight" in [one.name for one in result.differences]
    assert result.fault is not None
    assert result.fault.operator == "aten.tanh_backward.default"


def test_tensors_that_the_call_holds_are_compared_and_put_back() -> None:
    held = nn.Parameter(torch.ones(2))

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            held.add_(x)
        return (held * x).sum()

    seen = Step((torch.ones(2),), held={"w": held}).observe(call)
    assert seen["attribute w after"].tolist() == [2.0, 2.0]
    assert seen["gradient of attribute w"].tolist() == [1.0, 1.0]
    assert held.tolist() == [1.0, 1.0]


MODEL = nn.Linear(2, 2)


def test_the_modules_that_a_function_reads_are_found() -> None:
    inner = nn.Linear(1, 1)

    def loss(x: torch.Tensor) -> Any:
        return MODEL(x) + inner(x)

    assert modules_among(read_by(loss)) == {"MODEL": MODEL, "inner": inner}
    assert modules_among(read_by(MODEL)) == {"": MODEL}
    assert modules_among(read_by(MODEL.forward)) == {"": MODEL}
    assert modules_among(read_by(torch.sin)) == {}


class Cache:
    def __init__(self) -> None:
        self.layers = [{"ignored": 1}, Entry()]


class Entry:
    def __init__(self) -> None:
        self.keys = torch.zeros(2)


def test_tensors_inside_of_objects_are_compared_and_copied() -> None:
    cache = Cache()

    def fill(x: torch.Tensor, cache: Cache) -> Any:
        cache.layers[1].keys += x
        return x * 2, cache

    seen = Step((torch.ones(2), cache)).observe(fill)
    assert list(seen) == ["output 0", "output 1.layers[1].keys", "input 0 after", "input 1.layers[1].keys after"]
    assert torch.equal(seen["output 1.layers[1].keys"], torch.ones(2))
    assert torch.equal(cache.layers[1].keys, torch.zeros(2))


def test_gradients_that_exist_are_neither_changed_nor_hidden() -> None:
    model = nn.Linear(2, 1)
    free = torch.ones(1, requires_grad=True)
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(None if model.weight.grad is None else model.weight.grad.clone())
        loss = (model(x) * free).sum()
        loss.backward()
        return loss.detach()

    x = torch.ones(1, 2)
    step(x)
    before = [(one, one.grad, one.grad.clone()) for one in (*model.parameters(), free)]
    assert verify(step, x).ok
    for tensor, gradient, numbers in before:
        assert tensor.grad is gradient
        assert torch.equal(gradient, numbers)
    assert all(torch.equal(one, before[0][2]) for one in seen[1:])
