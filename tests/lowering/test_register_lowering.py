"""Lowerings that a program adds from outside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import ort_dynamo
from ort_dynamo import LoweringContext, register_lowering
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.capture.decompositions.table import decompositions
from ort_dynamo.errors import DuplicateLoweringError
from ort_dynamo.lowering import registry
from ort_dynamo.testing import assert_close, assert_like_eager, eager_reasons

INTERNALS = Path(__file__).resolve().parents[2] / "docs/internals"
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FROM_OUTSIDE", {})


@torch.library.custom_op("ort_dynamo_tests::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


scale.register_autograd(
    lambda ctx, grad: (scale(grad, ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)
SCALE = torch.ops.ort_dynamo_tests.scale.default


def lower_scale(ctx: LoweringContext, x: ir.Value, factor: float) -> ir.Value:
    return ctx.op.Mul(x, factor)


def model(x: torch.Tensor) -> torch.Tensor:
    return scale(x.exp(), 3.0).tanh()


def compiled_once(function: Any = model) -> torch.Tensor:
    torch._dynamo.reset_code_caches()
    return torch.compile(function, backend="ort_train")(torch.ones(3))


# -- registering -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_custom_operator_and_its_gradient_run_in_onnx_runtime(dynamic: bool) -> None:
    register_lowering(SCALE)(lower_scale)
    assert_like_eager(model, torch.randn(3, 4, requires_grad=True), dynamic=dynamic)


def test_the_example_of_the_guide_runs() -> None:
    text = (INTERNALS / "add_an_operator.md").read_text()
    (program,) = re.findall(r"```python\n(import onnx_ir.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(program, "guide", "exec", dont_inherit=True), names)
    x = names["x"].detach().clone().requires_grad_()
    names["soft_clip"](x * 3, 2.0).sum().backward()
    assert_close(names["x"].grad, x.grad, "the gradient")
    assert not eager_reasons()


def test_several_overloads_take_one_function() -> None:
    @register_lowering(SCALE, aten.linalg_matrix_exp.default, replace=True)  # which has one that refuses
    def double(ctx: LoweringContext, x: ir.Value, *rest: float) -> ir.Value:
        return ctx.op.Add(x, x)

    found = torch.compile(lambda x: torch.matrix_exp(scale(x, 9.0)), backend="ort_train")(torch.ones(2, 2))
    assert torch.equal(found, torch.full((2, 2), 4.0))


def test_a_second_lowering_is_refused_unless_it_replaces_the_first() -> None:
    register_lowering(SCALE)(lower_scale)
    with pytest.raises(DuplicateLoweringError, match=r"scale.default already has a lowering, .*lower_scale"):
        register_lowering(SCALE)(lambda ctx, x, factor: x)
    register_lowering(SCALE, replace=True)(lambda ctx, x, factor: ctx.op.Neg(x))
    assert_close(torch.compile(lambda x: scale(x, 3.0), backend="ort_train")(torch.ones(2)), -torch.ones(2), "it")


def test_one_of_ours_is_replaced_only_on_purpose() -> None:
    with pytest.raises(DuplicateLoweringError, match="unary"):
        register_lowering(SCALE, aten.exp.default)(lower_scale)
    assert registry.find_lowering(SCALE) is None, "a refused registration leaves nothing behind"
    register_lowering(aten.exp.default, replace=True)(lambda ctx, x: ctx.op.Abs(x))
    found = torch.compile(lambda x: x.exp(), backend="ort_train")(-torch.ones(2))
    assert torch.equal(found, torch.ones(2))


def test_an_overload_with_a_lowering_is_not_decomposed() -> None:
    addr = aten.addr.default
    assert addr in decompositions()
    register_lowering(addr)(lambda ctx, x, a, b: ctx.op.Neg(x))
    assert addr not in decompositions()
    x = torch.ones(2, 2)
    found = torch.compile(lambda x: torch.addr(x, x[0], x[0]), backend="ort_train")(x)
    assert torch.equal(found, -x)


def test_an_overload_whose_lowering_is_replaced_is_not_decomposed() -> None:
    roll = aten.roll.default
    assert roll in decompositions()
    register_lowering(roll, replace=True)(lambda ctx, x, shifts, dims=(): ctx.op.Neg(x))
    assert roll not in decompositions()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (aten.mul, "not the packet aten.mul; its overloads: torch.ops.aten.mul.Tensor"),
        (scale, r"torch\.ops\.ort_dynamo_tests\.scale\.default"),
        (torch.mul, "e.g. torch.ops.aten.mul.Tensor"),
    ],
    ids=["a packet", "the decorated function", "a function"],
)
def test_wrong_argument_is_refused_with_the_overloads_name(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        register_lowering(wrong)
    with pytest.raises(TypeError, match="at least one"):
        register_lowering()


def test_the_package_offers_two_names_and_no_others() -> None:
    assert all(getattr(ort_dynamo, name) for name in ort_dynamo.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lowerings'"):
        _ = ort_dynamo.lowerings


# -- graphs compiled before, and keys ----------------------------------------------------------------------------


def test_registration_leaves_compiled_graphs_unchanged() -> None:
    function = torch.compile(model, backend="ort_train")
    function(torch.ones(3))
    assert eager_reasons()
    register_lowering(SCALE)(lambda ctx, x, factor: ctx.op.Sub(x, x))
    assert_close(function(torch.ones(3)), model(torch.ones(3)), "the result")
    torch._dynamo.reset()
    assert torch.equal(function(torch.ones(3)), torch.zeros(3))


def test_a_changed_lowering_is_another_graph_and_an_equal_one_the_same() -> None:
    def times(number: float) -> Any:
        return lambda ctx, x, factor: ctx.op.Mul(x, factor * number)

    misses = []
    for number in (1.0, 2.0, 1.0):
        before = CACHE.misses
        register_lowering(SCALE, replace=True)(times(number))
        expected = torch.tanh(torch.ones(3).exp() * 3 * number)
        assert_close(compiled_once(), expected, f"the result of {number}")
        misses.append(CACHE.misses - before)
    assert misses == [1, 1, 0]


def test_a_lowering_that_cannot_be_spelled_is_compiled_each_time() -> None:
    class Settings:
        number = 1.0

    settings = Settings()
    register_lowering(SCALE)(lambda ctx, x, factor: ctx.op.Mul(x, settings.number))
    before = len(CACHE)
    for number in (2.0, 5.0):
        settings.number = number
        assert_close(compiled_once(), torch.tanh(torch.ones(3).exp() * number), "the result")
    assert len(CACHE) == before


# -- defects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lowering", "message"),
    [
        (lambda ctx, x: x, "TypeError"),
        (lambda ctx, x, factor: None, "gives None, not an onnx_ir.Value"),
        (lambda ctx, x, factor: ctx.op.Greater(x, factor), "gives BOOL, torch gives FLOAT"),
        (lambda ctx, x, factor: ctx.op.Mull(x, factor), "Mull"),
        (lambda ctx, x, factor: ctx.op.ReduceSum(x, keepdims=0), "gives the shape [], torch gives [3]"),
        (lambda ctx, x, factor: ctx.op.ReduceSum(x, keepdims=1), "gives the shape [1], torch gives [3]"),
        (lambda ctx, x, factor: ctx.op.Concat(x, x, axis=0), "gives the shape [6], torch gives [3]"),
    ],
    ids=["arguments", "nothing", "dtype", "operator", "rank", "one element", "size"],
)
def test_a_defective_lowering_is_an_error_that_names_the_line(lowering: Any, message: str) -> None:
    register_lowering(SCALE)(lowering)
    with pytest.raises(BackendCompilerFailed, match="LoweringError") as caught:
        torch.compile(model, backend="ort_train")(torch.ones(3))
    text = str(caught.value)
    assert message in text
    assert "test_register_lowering.py" in text
    assert "scale(x.exp(), 3.0)" in text
    assert f"Your program registered this lowering: {__name__}." in text


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "lowering",
    [
        lambda ctx, x, factor: ctx.op.Reshape(ctx.op.Mul(x, factor), ctx.op.Shape(x)),
        lambda ctx, x, factor: ctx.op.Mul(ctx.contrib.BiasGelu(x, x), 0.0),
        lambda ctx, x, factor: ctx.op.Reshape(
            ctx.op.MaxPool(ctx.op.Reshape(x, [1, 1, -1, 1]), kernel_shape=[1, 1]), [-1]
        ),
    ],
    ids=["a computed shape", "no inference", "a computed length"],
)
def test_a_lowering_whose_shape_onnx_does_not_know_is_lowered(lowering: Any, dynamic: bool) -> None:
    register_lowering(SCALE)(lowering)
    run = torch.compile(lambda x: scale(x, 3.0), backend="ort_train", dynamic=dynamic, options={"fallback": "error"})
    assert run(torch.ones(3)).shape == (3,)


def test_a_lowering_that_refuses_leaves_the_node_in_eager() -> None:
    @register_lowering(SCALE)
    def refuse(ctx: LoweringContext, x: ir.Value, factor: float) -> ir.Value:
        raise ctx.refuse("it is Sunday")

    assert_like_eager(model, torch.randn(3), gradients=False, allow_eager=True)
    assert eager_reasons() == {f"{SCALE}: it is Sunday": 1}


def test_a_defective_lowering_of_ours_says_to_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ctx: LoweringContext, x: ir.Value) -> ir.Value:
        raise ValueError("boom")

    monkeypatch.setitem(registry._REGISTRY, torch.ops.aten.erfinv.default, wrong)
    with pytest.raises(BackendCompilerFailed, match=r"boom\n  Please report this message"):
        torch.compile(torch.erfinv, backend="ort_train")(torch.zeros(3))
