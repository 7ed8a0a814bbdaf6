"""Tests of refused values and sizes: eager's exception class, raised before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refused_programs import CALLS, LEFT, Call
from torch import Tensor

from ort_dynamo.errors import EmptyReductionError, InvalidValueError

OPERATORS = sorted({call.operator for call in CALLS})


def cause(error: BaseException) -> BaseException:
    """Follow an exception to the first of its chain: Dynamo wraps an exception of the compile."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def raised(function: Callable[..., Any], tensors: tuple[Tensor, ...]) -> Exception | None:
    """Call with copies of the tensors; give the exception, or None. A call that raises may change none of them."""
    given = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    try:
        function(*given)
    except Exception as error:
        for one, other in zip(given, tensors, strict=True):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), "an argument was written to"
        return error
    return None


def check(call: Call, dynamic: bool) -> None:
    theirs = raised(call.function, call.tensors)
    assert theirs is not None, f"{call.fault}: eager does not raise"
    ours = compiled_raised(call, "ort_train", dynamic)
    assert ours is not None, f"{call.fault}: not refused; eager: {theirs!r}"
    alike = isinstance(ours, type(theirs)) or isinstance(cause(ours), type(theirs))
    if not alike and (traced := compiled_raised(call, "aot_eager", dynamic)) is not None:
        alike = type(cause(ours)) is type(cause(traced))  # torch's fake tensors have a class of their own
    assert alike != ((call.operator, call.fault) in LEFT), f"{call.fault}: {ours!r} is not eager's {theirs!r}"


def compiled_raised(call: Call, backend: str, dynamic: bool) -> Exception | None:
    torch._dynamo.reset()
    return raised(torch.compile(call.function, backend=backend, dynamic=dynamic), call.tensors)


@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_that_eager_rejects_are_rejected(operator: str) -> None:
    for call in CALLS:
        if call.operator == operator:
            check(call, dynamic=False)


@pytest.mark.default_placement
@pytest.mark.parametrize("operator", ["nn.functional.binary_cross_entropy", "histc", "max", "nn.functional.embedding"])
def test_the_default_placement_refuses_as_much(operator: str) -> None:
    for call in CALLS:
        if call.operator == operator:
            check(call, dynamic=False)


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_symbolic_sizes_refuse_as_much(operator: str) -> None:
    for call in CALLS:
        if call.operator == operator:
            check(call, dynamic=True)


# -- training ----------------------------------------------------------------------------------------------------


@pytest.mark.default_placement
@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_a_forgotten_sigmoid_stops_the_step_before_it_writes(placement: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    compiled = torch.compile(model_with_loss(model), backend="ort_train", options={"placement": placement})
    before = copy.deepcopy(model.state_dict())
    x, good = torch.randn(5, 4) * 9, torch.rand(5, 3)
    with pytest.raises(InvalidValueError, match=r"^all elements of input should be between 0 and 1\n") as stopped:
        compiled(x, good, False)
    assert "binary_cross_entropy" in str(stopped.value)
    assert "test_refused.py" in str(stopped.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name  # running statistics, too
    expected = copy.deepcopy(model)
    compiled(x, good, True).backward()
    model_with_loss(expected)(x, good, True).backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def model_with_loss(model: torch.nn.Module) -> Callable[..., Tensor]:
    def step(x: Tensor, target: Tensor, squashed: bool) -> Tensor:
        y = model(x)
        return F.binary_cross_entropy(y.sigmoid() if squashed else y, target)

    return step


# -- sizes that data decides -------------------------------------------------------------------------------------

REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    name: lambda y, name=name: getattr(torch, name)(y)
    for name in (
        *("max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "median", "nanmedian"),
        *("any", "all", "sum", "prod"),
    )
} | {
    f"{name}(0)": lambda y, name=name: getattr(torch, name)(y, 0)
    for name in ("max", "min", "amax", "argmax", "median", "nanmedian", "mode", "any", "all", "prod")
}


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_a_selection_is_reduced_as_in_eager_where_it_is_empty_too(name: str, dtype: torch.dtype) -> None:
    def reduce(x: Tensor, mask: Tensor) -> Any:
        return REDUCTIONS[name](x[mask])

    x = torch.tensor([3, 1, 2], dtype=dtype)
    compiled = torch.compile(reduce, backend="ort_train")
    for mask in ([True, True, False], [False, True, False], [False, False, False]):
        chosen = torch.tensor(mask)
        theirs = raised(reduce, (x, chosen))
        if theirs is None:
            torch.testing.assert_close(compiled(x, chosen), reduce(x, chosen), equal_nan=True)
        else:
            ours = raised(compiled, (x, chosen))
            if isinstance(ours, EmptyReductionError):
                assert isinstance(ours, type(theirs))
            else:  # where torch traces an operator with an assertion of its own
                torch._dynamo.reset()
                traced = raised(torch.compile(reduce, backend="aot_eager"), (x, chosen))
                assert type(ours) is type(traced) is RuntimeError


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_a_scatter_from_an_empty_selection_needs_an_empty_mask() -> None:
    compiled = torch.compile(lambda x, m, k: torch.masked_scatter(x, k, x[m]), backend="ort_train")
    x, none, one = torch.arange(3.0), torch.zeros(3, dtype=torch.bool), torch.tensor([False, True, False])
    for source, mask in ((none, none), (one, none), (one, one)):
        torch.testing.assert_close(compiled(x, source, mask), torch.masked_scatter(x, mask, x[source]))
    for source, mask in ((none, one), (one, ~none)):
        with pytest.raises(InvalidValueError, match="masked_scatter"):
            compiled(x, source, mask)
