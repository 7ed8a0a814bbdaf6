"""Tests of outputs, and of inputs' layouts: compiled programs against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from observed_programs import Compile, Program, facts, kinds, program, same_as_eager
from torch.utils._pytree import tree_leaves

# -- outputs -----------------------------------------------------------------------------------------------------


@program("outputs")
def that_are_inputs_views_and_nothing(compile_: Compile) -> Any:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x * 2
        return x, z, z, x.t(), z[1:], None, 3, "a", z.view(-1), y, (z.t(), [z + 1]), 2.5, True

    x, y = torch.randn(2, 3), torch.randn(3)
    return facts(x, y, *tree_leaves(compile_(function)(x, y)))


@program("outputs")
def the_same_with_gradients(compile_: Compile) -> Any:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x * y
        return x, z, z, x.t(), z[1:], None, 3, z.view(-1), y, (z.t(), [z + 1]), z.detach(), y.detach()

    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    outputs = tree_leaves(compile_(function)(x, y))
    seen = facts(x, y, *outputs)
    some = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    return seen, torch.autograd.grad([o.sin().sum() for o in some], [x, y])


@program("outputs")
def written_to_after_the_call(compile_: Compile) -> Any:
    def function(x: torch.Tensor) -> Any:
        z = x + 1
        return x[0], x.view(-1), z, z[1], z.t()

    x = torch.randn(2, 3)
    outputs = compile_(function)(x)
    outputs[0].add_(10)
    outputs[1][-1] = 99
    outputs[3].mul_(0)
    outputs[4][0, 0] = -5
    return facts(x, *outputs)


@program("outputs")
def views_written_to_after_the_call_with_gradients(compile_: Compile) -> Any:
    leaf = torch.randn(2, 3, requires_grad=True)
    x = leaf * 1
    row, z = compile_(lambda x: (x[0], x * 3))(x)
    row.mul_(2)
    z.add_(1)
    (x.sin().sum() + row.cos().sum() + z.sum()).backward()
    return facts(x, row, z), leaf.grad


@program("outputs")
def with_layouts(compile_: Compile) -> Any:
    def function(x: torch.Tensor) -> Any:
        y = x.relu()
        return (
            y.contiguous(memory_format=torch.channels_last),
            y.permute(0, 2, 3, 1),
            y.permute(0, 2, 3, 1).contiguous(),
            y[:, ::2],
            y[:, :, 1:3, ::2] * 2,
            y.mean((2, 3), keepdim=True).expand_as(y),
            y.transpose(1, 3) + 1,
            y.flatten(2).transpose(1, 2).exp(),
            torch.empty_like(y).fill_(3),
            torch.zeros_like(y.transpose(0, 1)),
            y.unfold(2, 2, 1),
        )

    x = torch.randn(2, 3, 4, 5)
    layouts = x, x.to(memory_format=torch.channels_last), x.transpose(1, 2), x[:, :, ::2], x[:1].expand(4, 3, 4, 5)
    return [facts(*compile_(function)(one)) for one in layouts]


@program("outputs")
def of_convolutions_in_channels_last(compile_: Compile) -> Any:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU()
    )
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    y = compile_(model)(x)
    y.sin().sum().backward()
    # Gradients of weights too small to tell: their strides are not promised.
    return facts(y), x.grad, [p.grad.contiguous() for p in model.parameters()]


@program("outputs")
def that_are_empty_or_of_rank_zero(compile_: Compile) -> Any:
    def function(x: torch.Tensor, n: torch.Tensor) -> Any:
        return x.sum(), x[:0], x.sum().view(1), n * 2, n.unsqueeze(0) + x[:0].sum(), x.new_empty(0), x[:, :0].sum(1)

    x, n = torch.randn(2, 3, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    outputs = compile_(function)(x, n)
    return facts(*outputs), torch.autograd.grad([o.sum() for o in outputs if o.requires_grad], [x, n])


@program("outputs")
def negated_in_their_bit_alone(compile_: Compile) -> Any:
    def function(x: torch.Tensor) -> Any:
        y, z = x * 2, torch.complex(x, x)
        return y, torch._neg_view(y)[1:], z, z.conj().imag

    y, negated, z, imaginary = compile_(function)(torch.ones(2, 3))
    bits = [tensor.is_neg() for tensor in (y, negated, z, imaginary)]
    negated.fill_(5)
    imaginary.zero_()

    def trained(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch._neg_view(y)[1:] @ x.t() + torch._neg_view(x)[1:] @ y.t()

    x = torch.randn(2, 3, requires_grad=True)
    product = compile_(trained)(x)
    return bits, y, negated, z, imaginary, product, torch.autograd.grad(product.sum(), x)


@program("outputs")
def nothing_at_all(compile_: Compile) -> Any:
    def function(x: torch.Tensor) -> None:
        x * 2

    return [compile_(function)(torch.ones(2))]


@program("outputs")
def constants(compile_: Compile) -> Any:
    def function(x: torch.Tensor) -> Any:
        return (
            torch.ones(2),
            torch.tensor([1.0, 2.0]),
            torch.arange(3),
            torch.tensor(5),
            torch.full((2,), 3),
            x.shape[0],
        )

    return facts(*compile_(function)(torch.ones(2)))


@program("outputs")
def constants_are_new_each_time(compile_: Compile) -> Any:
    function = compile_(lambda x: (torch.tensor([1.0, 2.0]), torch.zeros(2), x + 1))
    for tensor in function(torch.ones(2)):
        tensor.fill_(7)
    return list(function(torch.ones(2)))


@program("outputs")
def a_dataclass_and_a_named_tuple(compile_: Compile) -> Any:
    import collections
    import dataclasses

    pair = collections.namedtuple("pair", ["a", "b"])

    @dataclasses.dataclass
    class Both:
        x: torch.Tensor
        pairs: list[Any]

    def function(x: torch.Tensor) -> Any:
        return Both(x * 2, [pair(x + 1, {"k": x - 1})]), torch.max(x, 0)

    both, biggest = compile_(function, fullgraph=True)(torch.randn(3))
    return both.x, both.pairs[0].a, both.pairs[0].b, biggest.values, biggest.indices


@kinds("outputs")
def test_outputs(one: Program) -> None:
    same_as_eager(one)


# -- inputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("requires", [False, True])
def test_inputs_of_any_layout(requires: bool, dynamic: bool) -> None:
    def layouts(compile_: Compile) -> Any:
        base = torch.randn(4, 6, 5)
        seen = []
        for x in (
            base[::2, 1::3],
            base[1:, :, 2:4],
            base[:, :1].expand(4, 6, 5),
            base.permute(2, 0, 1),
            base.as_strided((3, 2), (1, 1), 7),
            base.flip(0)[1],
            base[0, 0, 0],
            base[:0],
            base.mT,
            base[:0, ::2].mT,
            base.unfold(1, 3, 2),
        ):
            leaf = x.detach().requires_grad_(requires)
            y = compile_(lambda x: (x * 2 + x.sum() / 100).tanh())(leaf)
            seen += facts(y)
            if requires:
                seen.append(torch.autograd.grad(y.sum(), leaf)[0].contiguous())
        return seen

    torch._dynamo.config.patch(recompile_limit=20)(same_as_eager)(layouts, dynamic=dynamic)


def test_numbers_as_arguments() -> None:
    def numbers(compile_: Compile) -> Any:
        @compile_
        def function(x: torch.Tensor, n: int, f: float, flag: bool, c: complex) -> Any:
            y = x * n + f
            return (y if flag else -y), torch.tensor(n) + 1, torch.tensor(f) * 2, n * 2, f / 2, n / 3, n // 2, c.real

        x = torch.randn(3)
        arguments = [(1, 0.5, True, 1j), (2, 0.25, False, 1j), (5, -1.5, True, 2 + 1j), (0, 3.0, True, 1j)]
        return [function(x, *a) for a in arguments]

    same_as_eager(numbers)
