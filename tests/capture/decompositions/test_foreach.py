"""Operators over lists of tensors, and the optimizer steps that consist of them."""

import functools

import pytest
import torch
from torch import optim
from torch._dynamo.utils import counters

from ort_dynamo.testing import assert_close, assert_like_eager, eager_reasons

UNARY = [
    torch._foreach_abs, torch._foreach_sqrt, torch._foreach_neg, torch._foreach_exp, torch._foreach_reciprocal,
    torch._foreach_rsqrt, torch._foreach_sign, torch._foreach_round, torch._foreach_log1p, torch._foreach_tanh,
    torch._foreach_sigmoid, torch._foreach_lgamma, torch._foreach_norm, torch._foreach_erfc,
    *([torch._foreach_clone] if hasattr(torch, "_foreach_clone") else []),  # since torch 2.12
]  # fmt: skip
BINARY = [torch._foreach_add, torch._foreach_sub, torch._foreach_mul, torch._foreach_div, torch._foreach_pow,
          torch._foreach_maximum, torch._foreach_minimum, torch._foreach_clamp_min,
          torch._foreach_clamp_max]  # fmt: skip


def lists(count):
    return [[torch.rand(3, 4) + 0.1, torch.rand(()) + 0.1, torch.rand(5, 1).double() + 0.1] for _ in range(count)]


def named(function):
    return function.__name__


def test_functions_of_one_list_equal_eager():
    assert_like_eager(lambda xs: [function(xs) for function in UNARY], *lists(1), gradients=False)
    assert_like_eager(
        lambda xs: (torch._foreach_norm(xs, 1), torch._foreach_norm(xs, torch.inf, dtype=torch.float64)),
        *lists(1),
        gradients=False,
    )


@pytest.mark.parametrize("function", BINARY, ids=named)
def test_functions_of_two_lists_equal_eager(function):
    def calls(xs, ys):
        return function(xs, ys), function(xs, 0.5), function(xs, [0.25, 0.5, 2.0])

    assert_like_eager(calls, *lists(2), gradients=False)


def test_one_tensor_for_the_whole_list_equals_eager():
    def calls(xs, y):
        quotients = torch._foreach_div(xs[:2], y)
        return torch._foreach_add(xs, y, alpha=0.5), torch._foreach_mul(xs, y), quotients, torch._foreach_pow(0.9, xs)

    assert_like_eager(calls, *lists(1), torch.tensor(0.75), gradients=False)


def test_functions_of_three_lists_equal_eager():
    def calls(xs, ys, zs):
        results = []
        for function in (torch._foreach_addcmul, torch._foreach_addcdiv):
            results += [
                function(xs, ys, zs, value=0.3),
                function(xs, ys, zs, [1.0, 2.0, 3.0]),
            ]
        return *results, torch._foreach_lerp(xs, ys, 0.2), torch._foreach_lerp(xs, ys, zs)

    assert_like_eager(calls, *lists(3), gradients=False)


def test_lists_changed_in_place_equal_eager():
    def change(xs, ys):
        torch._foreach_add_(xs, ys, alpha=2)
        torch._foreach_mul_(xs, 0.5)
        torch._foreach_copy_(ys, torch._foreach_neg(xs))
        torch._foreach_zero_(ys[:1])

    assert_like_eager(change, *lists(2), gradients=False)


def test_lists_of_integers_equal_eager():
    xs = [torch.tensor([3, -2, 7]), torch.tensor([1, 2], dtype=torch.int32)]
    calls = [torch._foreach_add, torch._foreach_mul, torch._foreach_maximum]
    assert_like_eager(lambda xs: [f(xs, n) for f in calls for n in (2, 0.5)], xs, gradients=False)


def test_lists_of_symbolic_sizes_equal_eager():
    assert_like_eager(
        lambda xs, ys: torch._foreach_addcdiv(xs, ys, torch._foreach_sqrt(ys), value=0.1),
        [torch.rand(3, 4), torch.rand(5)],
        [torch.rand(3, 4), torch.rand(5)],
        gradients=False,
        dynamic=True,
    )


REFUSED = {
    "lerp of integers": lambda x, i: torch._foreach_lerp([i], [i + 1], 0.5),
    "lerp of integers by a list": lambda x, i: torch._foreach_lerp([i], [i + 1], [i]),
    "lerp by a complex number": lambda x, i: torch._foreach_lerp([x], [x + 1], 1j),
    "addcmul with a complex value": lambda x, i: torch._foreach_addcmul([x], [x], [x], value=1j),
    "ceil of bools": lambda x, i: torch._foreach_ceil([i > 1]),
    "frac of integers": lambda x, i: torch._foreach_frac([x, i]),
    "powers by negative integers": lambda x, i: torch._foreach_pow([x, i], -1),
    "norm of integers": lambda x, i: torch._foreach_norm([x, i], 1),
    "norm of integers in floats": lambda x, i: torch._foreach_norm([i], 1, dtype=torch.float32),
    "norm in a narrower dtype": lambda x, i: torch._foreach_norm([x], 1, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED.keys())
def test_lists_that_eager_refuses_raise_eagers_error(function):
    torch._dynamo.reset()
    lists = torch.rand(4), torch.arange(4)
    with pytest.raises(RuntimeError) as theirs:
        function(*lists)
    with pytest.raises(RuntimeError) as ours:
        torch.compile(function, backend="ort_train")(*lists)
    assert (ours.type, str(ours.value)) == (theirs.type, str(theirs.value))


OPTIMIZERS = {
    "sgd": functools.partial(optim.SGD, lr=0.1),
    "sgd with momentum": functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": optim.Adam,
    "adam with amsgrad": functools.partial(optim.Adam, amsgrad=True, weight_decay=0.1),
    "adamw": functools.partial(optim.AdamW, lr=1e-2, maximize=True),
    "rmsprop": functools.partial(optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": functools.partial(optim.Adagrad, lr_decay=0.1),
    "adadelta": optim.Adadelta,
    "nadam": functools.partial(optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "rprop": optim.Rprop,
}


def trained(make_optimizer, compile_):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    optimizer = make_optimizer(model.parameters())
    step = compile_(optimizer.step)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_compiled_step_gives_the_parameters_of_eager(optimizer, foreach):
    make = functools.partial(optimizer, foreach=foreach)
    expected = trained(make, lambda step: step)
    actual = trained(make, functools.partial(torch.compile, backend="ort_train"))
    assert counters["ort_train"]["graphs"] > 0
    assert not eager_reasons()
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert_close(mine, theirs, f"parameter {index}")


@pytest.mark.parametrize("function", [torch._foreach_maximum, torch._foreach_minimum, torch._foreach_minimum_])
def test_an_order_of_complex_numbers_is_eagers_error(function):
    def call(xs, ys):
        return function(xs, ys)

    for run in (call, torch.compile(call, backend="ort_train")):
        with pytest.raises(NotImplementedError):
            run(*([torch.ones(2, dtype=torch.complex64) for _ in range(2)] for _ in range(2)))
