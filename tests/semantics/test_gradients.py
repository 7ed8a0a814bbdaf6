"""Tests of gradients: compiled programs against eager."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from observed_programs import Compile, Program, facts, kinds, program, same_as_eager


@program("gradients")
def that_are_none(compile_: Compile) -> Any:
    a, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    y = compile_(lambda a, b, c: a * 2 + c.detach() + b.long())(a, b, c)
    y.sum().backward()
    return a.grad, b.grad, c.grad


@program("gradients")
def of_some_outputs(compile_: Compile) -> Any:
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    x, y, z = compile_(lambda a, b: (a * b, a.exp(), b.long()))(a, b)
    # AOTAutograd gives zeros where eager gives None for b, on which only an unused output depends.
    return torch.autograd.grad(y.sum(), [a], retain_graph=True), torch.autograd.grad(x.sum(), [a, b]), z


@program("gradients")
def under_modes(compile_: Compile) -> Any:
    def function(x: torch.Tensor) -> Any:
        with torch.no_grad():
            a = x * 2
        with torch.enable_grad():
            b = x * 3
        with torch.set_grad_enabled(False):
            c = b + 1
        return a, b, c, a.requires_grad, b.requires_grad

    x = torch.randn(3, requires_grad=True)
    seen = facts(*compile_(function)(x))
    with torch.no_grad():
        seen += facts(*compile_(function)(x))
    with torch.inference_mode():
        inside = compile_(function)(x)
        seen += [i.is_inference() for i in inside if isinstance(i, torch.Tensor)]
    return seen


@program("gradients")
def of_an_inference_tensor(compile_: Compile) -> Any:
    with torch.inference_mode():
        x = torch.ones(3)
        y = compile_(lambda x: x * 2)(x)
    w = torch.ones(3, requires_grad=True)
    z = compile_(lambda x: x + 1)(x)
    return y.clone(), z.clone(), y.is_inference(), w


@program("gradients")
def required_inside(compile_: Compile) -> Any:
    def function(x: torch.Tensor) -> Any:
        y = x.detach() * 2
        return y.requires_grad, (y * x)

    x = torch.randn(3, requires_grad=True)
    flag, z = compile_(function)(x)
    z.sum().backward()
    return flag, facts(z), x.grad


@program("gradients")
def retained_and_accumulated(compile_: Compile) -> Any:
    x = torch.randn(3, requires_grad=True)
    y = compile_(lambda x: (x.exp() * x).tanh())(x)
    y.retain_grad()
    for _ in range(3):
        y.sum().backward(retain_graph=True)
    return x.grad, y.grad


@program("gradients")
def with_hooks(compile_: Compile) -> Any:
    seen: list[torch.Tensor] = []
    x = torch.randn(3, requires_grad=True)
    x.register_hook(lambda g: g * 2)
    model = torch.nn.Linear(3, 2)
    model.register_forward_hook(lambda m, i, o: o * 3)
    model.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
    model.weight.register_hook(lambda g: g + 1)
    y = compile_(model)(x)
    y.register_hook(lambda g: seen.append(g.clone()))
    y.sum().backward()
    return x.grad, model.weight.grad, seen


@program("gradients")
def with_hooks_inside(compile_: Compile) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 10)
        return y.sin()

    x = torch.randn(3, requires_grad=True)
    compile_(function)(x).sum().backward()
    return x.grad


@program("gradients")
def of_expanded_and_strided_cotangents(compile_: Compile) -> Any:
    seen = []
    for cotangent in (torch.ones(()).expand(3, 4), torch.randn(4, 3).t(), torch.randn(3, 8)[:, ::2], torch.zeros(3, 4)):
        x = torch.randn(3, 4, requires_grad=True)
        compile_(lambda x: x.sin() * 2)(x).backward(cotangent)
        seen.append(x.grad)
    return seen


@program("gradients")
def through_several_compiled_functions(compile_: Compile) -> Any:
    x = torch.randn(3, requires_grad=True)
    f, g = compile_(lambda x: (x * 2, x.sin())), compile_(lambda a, b: a * b)
    g(*f(x)).sum().backward()
    return x.grad


@program("gradients")
def of_tied_weights(compile_: Compile) -> Any:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, n: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(n).tanh())

    model = Tied()
    loss = F.cross_entropy(compile_(model)(torch.tensor([1, 2, 2])), torch.tensor([3, 4, 5]))
    loss.backward()
    return loss, model.head.weight.grad, model.head.weight is model.embedding.weight


@program("gradients")
def of_a_frozen_part(compile_: Compile) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    step = compile_(model)
    seen = []
    for frozen in (0, 1, 2):
        for index, layer in enumerate(model):
            layer.requires_grad_(index != frozen)
            layer.zero_grad()
        step(torch.ones(2, 3)).sum().backward()
        seen += [p.grad for p in model.parameters()]
    return seen


@program("gradients")
def of_a_function_of_autograd_with_two_uses(compile_: Compile) -> Any:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, k: float) -> Any:
            ctx.save_for_backward(x)
            ctx.k = k
            return x**3 * k, x > 0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
            (x,) = ctx.saved_tensors
            return gradient * 3 * x * x * ctx.k, None

    x = torch.randn(4, requires_grad=True)

    def function(x: torch.Tensor) -> Any:
        y, positive = Cube.apply(x, 2.0)
        z, _ = Cube.apply(y * positive, 0.5)
        return z

    z = compile_(function)(x)
    z.sum().backward()
    return z, x.grad


@program("gradients")
def of_checkpointed_parts(compile_: Compile) -> Any:
    from torch.utils.checkpoint import checkpoint

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout((x @ w).relu(), 0.3).sin()

    seen = []
    for reentrant in (False, True):
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

        def function(x: torch.Tensor, w: torch.Tensor, reentrant: bool = reentrant) -> torch.Tensor:
            y = checkpoint(block, x, w, use_reentrant=reentrant)
            return checkpoint(block, y, w, use_reentrant=reentrant).sum()

        torch.manual_seed(3)
        loss = compile_(function)(x, w)
        loss.backward()
        seen += [loss, x.grad, w.grad]
    return seen


@program("gradients")
def by_functional_transforms(compile_: Compile) -> Any:
    from torch.func import grad, jvp, vmap

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (w @ x).tanh().square().sum()

    w, x = torch.randn(3, 4), torch.randn(5, 4)
    return [
        compile_(lambda w, x: grad(loss)(w, x[0]))(w, x),
        compile_(lambda w, x: vmap(grad(loss), (None, 0))(w, x))(w, x),
        compile_(lambda w, x: vmap(loss, (None, 0))(w, x))(w, x),
        compile_(lambda w, x: jvp(lambda w: loss(w, x[0]), (w,), (torch.ones_like(w),)))(w, x),
        compile_(lambda w, x: grad(lambda w: grad(loss)(w, x[0]).sum())(w))(w, x),
    ]


@program("gradients")
def taken_inside(compile_: Compile) -> Any:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x * x).sum()
        (g,) = torch.autograd.grad(y, x)
        return g + 1

    return compile_(function)(torch.randn(3, requires_grad=True))


@kinds("gradients")
def test_gradients(one: Program) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*checkpoint.*")
        same_as_eager(one)


def test_a_gradient_of_a_gradient_is_torchs_own_error() -> None:
    x = torch.randn(3, requires_grad=True)
    y = torch.compile(lambda x: x.exp() * x, backend="ort_train")(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        first.sum().backward()
