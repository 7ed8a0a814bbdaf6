"""Tests of errors from data: they name the value, the operator, the module and the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ort_dynamo.errors import (
    EmptyReductionError,
    ExecutionError,
    IndexOutOfBoundsError,
    IntegerDivisionByZeroError,
    InvalidValueError,
)
from ort_dynamo.runtime.data_errors import data_error


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(4, 3)
        self.deep = nn.ModuleDict({"second": nn.Embedding(6, 3)})

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        return self.first(one) + self.deep["second"](two)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("one", "two", "says"),
    [
        (-1, 0, ["index -1 is out of bounds for a dimension of size 4", "of first (Embedding)"]),
        (7, 0, ["index 7 is out of bounds for a dimension of size 4", "of first (Embedding)"]),
        (3, 6, ["index 6 is out of bounds for a dimension of size 6", "of deep.second (Embedding)"]),
    ],
)
def test_an_embedding_names_the_index_and_the_module(
    dtype: torch.dtype, one: int, two: int, says: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    model = torch.compile(Words(), backend="ort_train")
    with pytest.raises(IndexOutOfBoundsError) as raised:
        model(torch.tensor([1, one], dtype=dtype), torch.tensor([0, two], dtype=dtype))
    text = str(raised.value)
    for words in [*says, "aten.embedding.default", 'test_data_errors.py", line ', 'self.deep["second"](two)']:
        assert words in text, text
    assert capfd.readouterr().err == ""  # ONNX Runtime prints nothing of its own


def lines() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], type[Exception]]]:
    index, labels = torch.tensor([5]), torch.tensor([0, -1])
    return {
        "aten.nll_loss_forward.default": (F.cross_entropy, (torch.randn(2, 3), labels), IndexOutOfBoundsError),
        "aten.gather.default": (lambda x, i: x.gather(0, i) + 1, (torch.randn(3), index), IndexOutOfBoundsError),
        "aten.index_add.default": (
            lambda x, i: x.index_add(0, i, torch.ones(1)),
            (torch.randn(3), index),
            IndexOutOfBoundsError,
        ),
        "aten.floor_divide.default": (
            lambda x, y: x // y,
            (torch.tensor([3, 4]), torch.tensor([0, 1])),
            IntegerDivisionByZeroError,
        ),
    }


@pytest.mark.parametrize("operator", lines())
def test_other_operators_name_the_line(operator: str) -> None:
    function, arguments, kind = lines()[operator]

    def called(*given: Tensor) -> Any:
        return function(*given)

    with pytest.raises(kind) as raised:
        torch.compile(called, backend="ort_train")(*arguments)
    assert f"{operator}\n" in str(raised.value)
    assert "test_data_errors.py" in str(raised.value)


def test_a_shared_session_names_the_caller_at_hand() -> None:
    first, second = Words(), Words()

    class Other(Words):
        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            return self.first(one) + self.deep["second"](two)  # another line

    good, bad = torch.tensor([1]), torch.tensor([9])
    torch.compile(first, backend="ort_train")(good, good)
    del second
    with pytest.raises(IndexOutOfBoundsError, match="another line"):
        torch.compile(Other(), backend="ort_train")(bad, good)


def test_a_backward_names_the_module_too() -> None:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
            ctx.save_for_backward(index)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            (index,) = ctx.saved_tensors
            return grad.gather(0, index), None

    x = torch.randn(3, requires_grad=True)
    result = torch.compile(lambda x, i: Writes.apply(x, i), backend="ort_train")(x, torch.tensor([0, 1, 8]))
    with pytest.raises(IndexOutOfBoundsError, match=r"aten\.gather\.default"):
        result.sum().backward()


def test_words_without_a_known_node_are_kept() -> None:
    error = data_error("Non-zero status code. Name:'Mul_3' Status Message: no", {})
    assert type(error) is ExecutionError
    assert str(error).endswith("ONNX Runtime: Non-zero status code. Name:'Mul_3' Status Message: no")


@pytest.mark.parametrize(("mark", "kind"), [("refused", InvalidValueError), ("empty", EmptyReductionError)])
def test_a_check_says_its_words(mark: str, kind: type[ExecutionError]) -> None:
    name = f"{mark}.max: max(): Expected no more: nothing."
    error = data_error(f"Non-zero status code. Name:'{name}' Status Message: idx=1", {name: "aten.max.default"})
    assert type(error) is kind
    assert str(error) == "max(): Expected no more: nothing.\n  aten.max.default"


@pytest.mark.parametrize("index", [-1, -(1 << 60), -(1 << 63), (1 << 61) - 1, 7])
def test_an_index_is_told_as_the_program_gave_it(index: int) -> None:
    seen = index & ~(1 << 62) if index < 0 else index
    words = f"indices element out of data bounds, idx={seen} must be within the inclusive range [-5,4]"
    assert f"index {index} is out of bounds for a dimension of size 5" in str(data_error(words, {}))


def test_the_node_that_stopped_in_a_branch_is_the_innermost() -> None:
    words = "running If node. Name:'outer' Status Message: running Gather node. Name:'refused.node: too large' Status"
    error = data_error(words, {"outer": "of the wrong one", "refused.node: too large": "of the right one"})
    assert isinstance(error, InvalidValueError)
    assert str(error).splitlines()[:2] == ["too large", "  of the right one"]


@pytest.mark.parametrize("model", [nn.Embedding(10, 3), nn.Sequential(nn.Embedding(10, 3), nn.Linear(3, 2))])
def test_an_index_of_torchs_own_module_has_the_modules_name_and_no_gradient_formula(model: nn.Module) -> None:
    with pytest.raises(IndexOutOfBoundsError) as raised:
        torch.compile(model, backend="ort_train")(torch.tensor([[1, 20]]))
    assert "(Embedding) calls itself)" in str(raised.value)
    assert "gradient formula" not in str(raised.value)
