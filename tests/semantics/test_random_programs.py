"""Random programs of views, writes into them, promotions and sizes, compared with eager: values, memory and gradients.

A program is text whose every line eager has accepted. Such programs, by the thousand, found what hand-written ones did
not: gradients lost by a write under no_grad, slices that turn out empty, sizes computed from two symbols. Left out are
views made under no_grad: AOTAutograd gives them a gradient, with every backend.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ort_dynamo.testing import Tolerance, assert_close

TOLERANCE = Tolerance(1e-6, 1e-9)
"""The tolerance of float64 values; some of them were float32 on the way."""

ROLES = (
    "{new} = {a}{view}",
    "{new} = {a}{view}",
    "{a}{view}.{write}",
    "{new} = {function}",
    "{new} = {a} {binary} {b}",
)
VIEWS = (".t()", "[1:]", "[..., ::2]", ".unsqueeze(0)", ".flatten()", ".diagonal()", ".expand(2, *{a}.shape)", "[0]")
VIEWS += (".detach()", ".transpose(0, -1)", ".unbind(-1)[0]", ".reshape({a}.shape[0], -1)", ".narrow(0, 0, 1)", "")
WRITES = (
    "add_({b})",
    "mul_(2)",
    "zero_()",
    "copy_({b})",
    "sigmoid_()",
    "masked_fill_({a}{view} > 0, 0.5)",
    "sub_({b})",
)
BINARY = ("+", "-", "*", ">", "+ 2 *", "* 0.5 -")
FUNCTIONS = ("{a}.sum(-1)", "{a}.sin()", "{a}.amax(0)", "torch.cat([{a}, {a}], -1)", "torch.where({a} > 0, {a}, {b})")
FUNCTIONS += ("{a}.to(torch.float32)", "{a}.clone()", "{a} * {a}.shape[0]", "torch.arange({a}.shape[-1]) + {a}")
FUNCTIONS += ("{a}.diagonal_scatter({a}.diagonal() * 2)", "{a}.flip(0)", "{a}.cumsum(-1)", "{a}.index_select(0, I)")


def inputs() -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Leaves, and the arguments: a leaf's copy, a transposed one, integers, a part of a larger tensor."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(4, 3, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(2)]
    whole = torch.randn(5, 4, dtype=torch.float64, generator=generator)
    arguments = (leaves[0].clone(), leaves[1].t().clone(), torch.arange(12).reshape(4, 3), whole[1:, 1:])
    return leaves, dict(zip("wxyz", arguments, strict=True))


def write_program(seed: int, lines: int = 8) -> str:
    choose = random.Random(seed)
    body: list[str] = []
    names = list("wxyz")
    while len(body) < lines:
        new, a, b = f"v{len(body)}", choose.choice(names[-6:]), choose.choice([*names[-6:], "2", "1.5"])
        view, write, binary, function = (choose.choice(kind) for kind in (VIEWS, WRITES, BINARY, FUNCTIONS))
        line = choose.choice(ROLES)
        for _ in range(3):  # parts have parts
            line = line.format(new=new, a=a, b=b, view=view, write=write, binary=binary, function=function)
        if ".detach()" not in line and line.endswith(")") and "=" not in line and choose.random() < 0.3:
            line = f"with torch.no_grad(): {line}"
        made = [new] if f"{new} =" in line else []
        try:
            result = run(source([*body, line], [*names[-2:], *made]), inputs()[1])
        except (RuntimeError, IndexError, TypeError):
            continue
        if all(value.numel() < 500 and value.abs().sum() < 1e4 for value in result if value.dtype.is_floating_point):
            body.append(line)
            names += made
    return source(body, [*names[-4:], choose.choice(names)])


def source(body: list[str], results: list[str]) -> str:
    return "\n    ".join(
        ["def program(w, x, y, z):", "I = torch.tensor([0, 0])", *body, f"return {', '.join(results)}"]
    )


def run(text: str, arguments: dict[str, Any], **options: Any) -> tuple[torch.Tensor, ...]:
    scope: dict[str, Any] = {"torch": torch}
    exec(text, scope)
    function = torch.compile(scope["program"], backend="ort_train", **options) if options else scope["program"]
    results: tuple[torch.Tensor, ...] = function(**arguments)
    return results


def observed(text: str, **options: Any) -> tuple[list[Any], tuple[torch.Tensor | None, ...]]:
    """Run the program; give all that it shows, and its gradients."""
    leaves, arguments = inputs()
    results = run(text, arguments, **options)
    tensors = [*arguments.values(), *results]
    shared = [[a.untyped_storage()._cdata == b.untyped_storage()._cdata for a in tensors] for b in tensors]
    total = sum((t.double().cos().sum() for t in tensors if t.requires_grad), torch.zeros(()))
    gradients = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ()
    facts = [fact for tensor in tensors for fact in (tensor.detach(), tensor.requires_grad)]
    return [*facts, str(shared)], gradients


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_equals_eager(seed: int, dynamic: bool) -> None:
    text = write_program(seed)
    try:
        expected, gradients = observed(text)
    except RuntimeError:  # a saved tensor was overwritten; the compiled program saves a copy
        pytest.skip("eager cannot differentiate it")
    found, own_gradients = observed(text, dynamic=dynamic)
    for index, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_close(mine, theirs, f"value {index} of\n{text}\n", TOLERANCE)
    for index, (mine, theirs) in enumerate(zip(own_gradients, gradients, strict=True)):
        # Where eager has no gradient, AOTAutograd may give zeros; strides of gradients follow the cotangents'.
        theirs = torch.zeros_like(mine) if theirs is None and mine is not None else theirs
        assert_close(mine, theirs, f"gradient {index} of\n{text}\n", TOLERANCE, strides=False)
