"""Tests of inputs that a program writes to: compiled against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from observed_programs import Compile, Program, facts, kinds, program, same_as_eager
from torch.utils._pytree import tree_leaves


def mutations() -> dict[str, Callable[[torch.Tensor], Any]]:
    def in_place(x: torch.Tensor) -> Any:
        x.add_(1).mul_(2)

    def returned(x: torch.Tensor) -> Any:
        return x.add_(1)

    def of_a_row(x: torch.Tensor) -> Any:
        x[1].mul_(3)
        return x.sum()

    def of_a_slice(x: torch.Tensor) -> Any:
        x[::2, 1:] = 7
        return x * 2

    def of_a_transpose(x: torch.Tensor) -> Any:
        x.t().add_(torch.arange(3.0))
        return x.t() * 2

    def of_a_view(x: torch.Tensor) -> Any:
        y = x.view(-1)
        y[3:].copy_(y[:9].clone())
        return y

    def of_a_diagonal(x: torch.Tensor) -> Any:
        x.diagonal().fill_(0)

    def by_copy(x: torch.Tensor) -> Any:
        x.copy_(x.flip(0) + 1)

    def by_copy_of_another_dtype(x: torch.Tensor) -> Any:
        x.copy_(torch.arange(4))

    def zeroed(x: torch.Tensor) -> Any:
        return x.zero_() + 1

    def by_index(x: torch.Tensor) -> Any:
        x[torch.tensor([0, 2, 0])] += 1

    def by_index_put(x: torch.Tensor) -> Any:
        x.index_put_((torch.tensor([0, 0, 1]),), torch.ones(3, 4), accumulate=True)

    def by_mask(x: torch.Tensor) -> Any:
        x[x > 0] = -1.0
        return x + 1

    def by_scatter(x: torch.Tensor) -> Any:
        x.scatter_(1, torch.tensor([[0], [1], [2]]), 5.0)

    def by_scatter_add(x: torch.Tensor) -> Any:
        x.scatter_add_(0, torch.zeros(3, 4, dtype=torch.long), x.clone())

    def twice_with_a_read_between(x: torch.Tensor) -> Any:
        a = x + 1
        x.mul_(2)
        b = x + 1
        x.sub_(a)
        return a, b

    def by_out(x: torch.Tensor) -> Any:
        torch.add(x, 1, out=x)

    def and_returned_as_a_view(x: torch.Tensor) -> Any:
        x.relu_()
        return x[1:], x

    def masked_fill(x: torch.Tensor) -> Any:
        x.masked_fill_(x < 0, 0.5)

    def of_an_expanded_read(x: torch.Tensor) -> Any:
        x += x[0].clone()
        return x

    def of_pieces(x: torch.Tensor) -> Any:
        for index in range(3):
            x[index].add_(index)
        a, b = x.narrow(1, 0, 2), x.narrow(1, 2, 2)
        a.sub_(b.clone())

    def of_strided(x: torch.Tensor) -> Any:
        x.as_strided((2, 2), (1, 4)).add_(10)

    def as_lerp_and_addcmul(x: torch.Tensor) -> Any:
        x.lerp_(torch.ones_like(x), 0.3).addcmul_(x.clone(), x.clone(), value=0.1).addcdiv_(x.clone(), x + 9)

    return {name: f for name, f in locals().items() if callable(f)}


@pytest.mark.parametrize("mutate", mutations().values(), ids=mutations())
def test_an_input_of_any_size_written_to(mutate: Callable[[torch.Tensor], Any]) -> None:
    def on_a_plain_input(compile_: Compile) -> Any:
        x = torch.randn(3, 4)
        outputs = tree_leaves(compile_(mutate)(x))
        return facts(x, *outputs)

    same_as_eager(on_a_plain_input, dynamic=True)


@pytest.mark.parametrize("mutate", mutations().values(), ids=mutations())
def test_an_input_written_to_that_a_gradient_flows_through(mutate: Callable[[torch.Tensor], Any]) -> None:
    def through(compile_: Compile) -> Any:
        leaf = torch.randn(3, 4, requires_grad=True)
        x = leaf * 1
        outputs = tree_leaves(compile_(mutate)(x))
        total = sum((o.cos().sum() for o in [x, *outputs] if isinstance(o, torch.Tensor)), torch.zeros(()))
        seen = facts(x, *outputs)
        total.backward()
        return [*seen, leaf.grad]

    if mutate.__name__ == "by_out":
        pytest.skip("out= takes no tensors that require gradients")
    same_as_eager(through)


@program("mutation")
def of_a_leaf_without_recorded_gradients(compile_: Compile) -> Any:
    x = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x * 3

    y = compile_(step)(x)
    y.sum().backward()
    return facts(x, y), x.grad


@program("mutation")
def of_a_buffer(compile_: Compile) -> Any:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(3))
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.last = x.sum()
            return (x - self.mean) * self.weight

    model = Counter()
    step = compile_(model)
    for number in range(3):
        step(torch.full((2, 3), float(number))).sum().backward()
    return [dict(model.named_buffers()), model.weight.grad, model.last]


@program("mutation")
def of_one_of_two_inputs_that_share_memory(compile_: Compile) -> Any:
    base = torch.arange(8.0)
    first, second = base[:6], base[2:]

    def step(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(1)
        return a * b

    return facts(base, compile_(step)(first, second))


@program("mutation")
def of_both_inputs_that_are_one_tensor(compile_: Compile) -> Any:
    def step(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(1)
        b.mul_(2)
        return a + b

    x = torch.arange(4.0)
    return facts(x, compile_(step)(x, x))


@program("mutation")
def of_inputs_that_are_views_with_gradients(compile_: Compile) -> Any:
    leaf = torch.arange(8.0, requires_grad=True)
    base = leaf * 1
    first, second = base[:4], base[4:]

    def step(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.mul_(2)
        return (a * b).sum(), b.clone()

    y, _ = compile_(step)(first * 1, second)
    (y.sum() + base.sin().sum()).backward()
    return facts(base, y), leaf.grad


@program("mutation")
def of_an_input_and_its_base(compile_: Compile) -> Any:
    def step(base: torch.Tensor, view: torch.Tensor) -> Any:
        base.add_(1)
        view.mul_(2)
        return base.clone(), view.clone()

    base = torch.arange(4.0)
    return facts(base, *compile_(step)(base, base[1:3]))


@program("mutation")
def of_a_list_and_a_dict_of_inputs(compile_: Compile) -> Any:
    def step(tensors: list[torch.Tensor], named: dict[str, torch.Tensor]) -> Any:
        tensors[0].add_(named["x"])
        tensors.append(tensors[0] * 2)
        named["y"] = tensors[1] + 1
        return len(tensors)

    tensors, named = [torch.ones(2), torch.zeros(2)], {"x": torch.ones(2)}
    return compile_(step)(tensors, named), tensors, named


@program("mutation")
def of_a_copy_leaves_the_input_alone(compile_: Compile) -> Any:
    def step(x: torch.Tensor) -> Any:
        y = x.clone()
        y[0] = 5
        z = x.reshape(-1)
        w = x.t().reshape(-1)
        w.add_(1)
        return y, z, w

    x = torch.randn(2, 3)
    return facts(x, *compile_(step)(x))


@program("mutation")
def of_data_while_detached(compile_: Compile) -> Any:
    def step(x: torch.Tensor) -> Any:
        y = x.detach()
        y.mul_(2)
        return (x * x).sum()

    x = torch.randn(3, requires_grad=True)
    z = x * 1
    loss = compile_(step)(z)
    return facts(z, loss)


@program("mutation")
def of_an_input_used_in_the_gradient(compile_: Compile) -> Any:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = (x * w.clone()).sum()
        w.detach().zero_()
        return y

    x, w = torch.randn(3, requires_grad=True), torch.randn(3)
    y = compile_(step)(x, w * 1)
    (gradient,) = torch.autograd.grad(y, x)
    return y, gradient


@program("mutation")
def of_an_output_later_does_not_reach_the_saved_copy(compile_: Compile) -> Any:
    x = torch.randn(3, requires_grad=True)
    y = compile_(lambda x: x.exp())(x)
    z = y.detach()
    before = z.clone()
    return before, torch.autograd.grad(y.sum(), x)[0]


@program("mutation")
def by_set_of_an_attribute(compile_: Compile) -> Any:
    class Keeper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache["last"] = x * 2
            return self.cache["last"] + 1

    model = Keeper()
    y = compile_(model)(torch.ones(2))
    return y, model.cache


class Counter(torch.nn.Module):
    """A layer whose buffers change with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.norm(self.linear(x)).tanh()


@program("mutation")
def of_gradients_by_an_operator_that_also_gives_a_list(compile_: Compile) -> Any:
    grads, found, scale = [torch.ones(10), torch.full((3,), torch.inf)], torch.zeros(1), torch.full((1,), 0.25)

    def unscale() -> torch.Tensor:
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, scale)
        return grads[0].detach() + found

    return compile_(unscale)(), grads, found


@program("mutation")
def of_buffers_in_a_checkpointed_block(compile_: Compile) -> Any:
    from torch.utils.checkpoint import checkpoint

    seen = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        block, x = Counter(), torch.randn(5, 4, requires_grad=True)
        checkpoint(compile_(block), x, use_reentrant=reentrant).square().sum().backward()
        seen += [x.grad, *block.buffers(), *(one.grad for one in block.parameters())]
    return seen


@program("mutation")
def of_buffers_although_a_hook_of_saved_tensors_raises(compile_: Compile) -> Any:
    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise KeyError("the hook")

    torch.manual_seed(0)
    block, x = Counter(), torch.randn(5, 4, requires_grad=True)
    run = compile_(block)
    run(x)
    with pytest.raises(KeyError, match="the hook"), torch.autograd.graph.saved_tensors_hooks(refuse, lambda one: one):
        run(x)
    return block.calls  # eager stops before the norm's buffers


@kinds("mutation")
def test_mutation(one: Program) -> None:
    same_as_eager(one)
