"""Tests of mutation, aliasing, outputs, gradients and layouts: compiled programs against eager.

Each program runs twice, with its functions left alone and with them compiled, and returns everything it can observe.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from ort_dynamo.testing import assert_close

Compile = Callable[..., Any]
Program = Callable[[Compile], Any]


def same_as_eager(program: Program, **kwargs: Any) -> None:
    torch.manual_seed(0)
    expected = tree_leaves(program(lambda function, **_: function))
    torch.manual_seed(0)
    found = tree_leaves(
        program(lambda function, **more: torch.compile(function, backend="ort_train", **kwargs, **more))
    )
    assert len(found) == len(expected)
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert type(mine) is type(theirs), f"value {index} is {type(mine)}, eager gives {type(theirs)}"
        assert_close(mine, theirs, f"value {index}")


def facts(*tensors: Any) -> list[Any]:
    """Give the tensors, and for each its requires_grad and the earlier ones that share its memory."""
    seen: list[Any] = []
    for index, tensor in enumerate(tensors):
        seen.append(tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor)
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage().data_ptr()
            before = [t for t in tensors[:index] if isinstance(t, torch.Tensor)]
            shares = [i for i, t in enumerate(before) if storage and t.untyped_storage().data_ptr() == storage]
            same = [i for i, t in enumerate(before) if t is tensor]
            seen += [str(shares), str(same), tensor.requires_grad, tensor.is_leaf, str(tensor.stride())]
    return seen


PROGRAMS: dict[str, list[Program]] = {}


def program(kind: str) -> Callable[[Program], Program]:
    def add(function: Program) -> Program:
        PROGRAMS.setdefault(kind, []).append(function)
        return function

    return add


def kinds(kind: str) -> Any:
    return pytest.mark.parametrize("one", PROGRAMS[kind], ids=lambda p: p.__name__)


# -- mutation of inputs ------------------------------------------------------------------------------------------


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


@kinds("mutation")
def test_mutation(one: Program) -> None:
    same_as_eager(one)


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


# -- gradients ---------------------------------------------------------------------------------------------------


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
