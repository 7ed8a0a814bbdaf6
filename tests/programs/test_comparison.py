"""A comparison finds faults: each test runs a program in eager, with one fault added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from program_comparison import Baseline, Case, baseline, check, differences
from program_rounding import Rounded
from program_run import Compile
from program_text import Input, Line, Program
from program_writer import write_case
from torch import Tensor, nn

Results = list[Tensor]
Fault = Callable[[nn.Module, Sequence[Tensor], Results], Results]

PROGRAM = Program(
    inputs=(Input("x0", (None, 3, 6, 6), copied=True), Input("x1", (None, 4, 1, 1), differentiable=False)),
    parts={"p0": "nn.Conv2d(3, 4, 3, padding=1)", "p1": "nn.BatchNorm2d(4)"},
    body=(
        Line("v0 = self.p0(x0)", ("v0",)),
        Line("v1 = self.p1(v0)", ("v1",)),
        Line("v2 = F.silu(v1)", ("v2",)),
        Line("v3 = v2 * x1", ("v3",)),
        Line("v4 = v3.flatten(2)", ("v4",)),
        Line("v5 = v2.clone()", ("v5",)),
    ),
    results=("v2", "v3", "v4", "v5"),
    training=True,
)
"""Its results: a value that was saved, a value and its view, and a copy of the first."""


class _ScaledGradient(torch.autograd.Function):
    """The identity, with a backward that multiplies by a factor; by None, it has no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float | None) -> Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return (None if ctx.factor is None else gradient * ctx.factor), None


def _first(change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda module, arguments, results: [change(results[0]), *results[1:]]


def _all(change: Callable[[Tensor], Tensor]) -> Fault:
    return lambda module, arguments, results: [change(result) for result in results]


def _scale(gradient: float | None) -> Fault:
    return _all(lambda result: _ScaledGradient.apply(result, gradient) if result.requires_grad else result)


def _done(change: Callable[[nn.Module, Sequence[Tensor]], Any]) -> Fault:
    """Change something besides the results."""

    def fault(module: nn.Module, arguments: Sequence[Tensor], results: Results) -> Results:
        with torch.no_grad():
            change(module, arguments)
        return results

    return fault


def _raise(*_: Any) -> Results:
    raise ZeroDivisionError("nobody divides")


FAULTS: dict[str, tuple[Fault, str]] = {
    "a value": (_first(lambda t: t * (1 + 1e-3)), "wrong result"),
    "one element": (_first(lambda t: t + 1e-3 * t.detach().max() * (t == t.max())), "wrong result"),
    "gradients": (_scale(1 + 1e-3), "wrong gradient"),
    "no gradients": (_scale(None), "other exists of a gradient"),
    "detached": (_first(lambda t: t.detach().clone()), "other requires_grad of a result"),
    "strides": (_first(lambda t: t.mT.contiguous().mT), "other strides of a result"),
    "a dtype": (_first(lambda t: t.bfloat16()), "other dtype of a result"),
    "a shape": (_first(lambda t: t[:1]), "other shape of a result"),
    "an alias for a copy": (lambda m, a, r: [*r[:3], r[0]], "other identity"),
    "shared memory for a copy": (lambda m, a, r: [*r[:3], r[0].view(r[0].shape)], "other memory"),
    "a copy for a view": (lambda m, a, r: [*r[:2], r[2].clone(), r[3]], "other memory"),
    "a view for no view": (_first(lambda t: t.flatten().view(t.shape)), "other _is_view of a result"),
    "a result less": (lambda m, a, r: r[:3], "other number of results"),
    "a write to an argument": (_done(lambda module, a: a[1].data.mul_(1 + 1e-3)), "wrong argument"),
    "a write to a parameter": (_done(lambda m, a: m.p0.bias.mul_(2)), "other is as it was of a parameter"),
    "a lost write to a buffer": (_done(lambda m, a: m.p1.running_mean.data.zero_()), "wrong buffer"),
    "a random number": (_done(lambda module, arguments: torch.rand(1)), "other random state"),
    "an error": (_raise, "ZeroDivisionError in the forward: nobody divides"),
}
"""Name -> the fault, and the kind of difference that it is."""


def _with_fault(fault: Fault) -> Compile:
    return lambda module: lambda *arguments: fault(module, arguments, [*module(*arguments)])


def test_a_result_that_the_next_call_overwrites_is_found(known: Baseline) -> None:
    def reuse(module: nn.Module) -> Callable[..., Any]:
        buffers: list[Tensor] = []

        def run(*arguments: Tensor) -> Results:
            first, *others = module(*arguments)
            if buffers:
                buffers[0].data.copy_(first.data)
            buffers[:] = buffers or [first]
            return [first, *others]

        return run

    ours = Case(PROGRAM, "training").observe(compile_=reuse)
    assert "call 0: result 0 after all calls" in {one.name for one in differences(ours, known)}


def test_eager_is_like_eager() -> None:
    assert check(Case(PROGRAM, "training"), lambda module: module) == ("ok", [])


@pytest.fixture(scope="module")
def known() -> Baseline:
    return baseline(Case(PROGRAM, "training"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, known: Baseline) -> None:
    fault, kind = FAULTS[name]
    ours = Case(PROGRAM, "training").observe(compile_=_with_fault(fault))
    assert kind in {one.kind for one in differences(ours, known)}


def test_a_fault_that_is_not_torchs_is_wrong() -> None:
    fault, kind = FAULTS["gradients"]
    state, found = check(Case(PROGRAM, "training"), _with_fault(fault))
    assert state == "wrong"
    assert found[0].kind == kind


def test_zeros_for_no_gradient_are_wrong_where_aot_eager_has_none() -> None:
    program = Program(
        inputs=(Input("x0", (None, 3)), Input("x1", (None, 3))),
        body=(Line("v0 = x0.detach() * 2", ("v0",)), Line("v1 = x1.cos()", ("v1",))),
        results=("v0", "v1"),
    )
    zeros = _with_fault(lambda module, arguments, results: [results[0], results[1] + 0 * arguments[0].sum()])
    state, found = check(Case(program, "training"), zeros)
    assert (state, {one.kind for one in found}) == ("wrong", {"zeros for no gradient"})


def test_an_error_of_eager_that_does_not_come_is_found() -> None:
    program = Program(
        PROGRAM.inputs[:1], body=(Line("v0 = x0.exp()", ("v0",)),), results=("v0",), after="results[0].mul_(2)"
    )
    copy = _with_fault(_first(lambda t: t.clone()))
    assert "no error in the backward" in {one.kind for one in check(Case(program, "training"), copy)[1]}


def test_shared_memory_without_a_view_is_no_fault() -> None:
    no_view = _with_fault(lambda module, arguments, results: [result.data for result in results])
    assert check(Case(PROGRAM, "inference"), no_view) == ("ok", [])


@pytest.mark.parametrize("seed", range(10))
def test_a_thousandth_is_found_in_generated_programs(seed: int) -> None:
    case, _ = write_case(1000 + seed, "training")
    if case.program.precision not in ("float32", "float64"):
        pytest.skip(f"{case.program.precision} has no thousandths")
    case = replace(case, program=replace(case.program, after=""))  # a write to a result may hide a fault of it
    known = baseline(case)
    for fault, kind in ((_all(lambda t: t * (1 + 1e-3)), "wrong result"), (_scale(1 + 1e-3), "wrong gradient")):
        sizes = [bool(known.exact.tensors[name].double().abs().sum()) for name in known.limits if kind[6:] in name]
        found = {one.kind for one in differences(case.observe(compile_=_with_fault(fault)), known)}
        assert kind in found or not any(sizes)


def test_rounding_is_relative_to_terms_that_cancel() -> None:
    terms = torch.tensor([1e4, -1e4, 1.0], dtype=torch.float64)
    with Rounded(2**-24):
        total, moved = terms.sum(), terms.flip(0).clone().relu()
    assert 1e-6 < abs(float(total) - 1) < 1e-2
    assert torch.equal(moved, torch.tensor([1.0, 0.0, 1e4], dtype=torch.float64))
