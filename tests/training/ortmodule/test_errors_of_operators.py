"""Errors of operators that refuse their inputs are those of eager mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import Dense
from torch import Tensor, nn

from ort_dynamo import ORTModule


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (nn.BatchNorm1d(8), (torch.ones(1, 8),), "more than 1 value per channel"),
        (nn.NLLLoss(), (torch.ones(4, 8), torch.tensor([1, 2])), "to match target batch_size"),
        (nn.BCELoss(), (torch.ones(4, 8), torch.ones(2)), "different to the input size"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_an_error_of_an_operator_has_eagers_class(model: nn.Module, inputs: tuple[Tensor, ...], message: str) -> None:
    try:
        {}["missing"]
    except KeyError:  # which is the context of the errors here, and none of them
        for one in (model, ORTModule(model)):
            with pytest.raises(ValueError, match=message):
                one(*inputs)


def test_an_error_of_an_operator_names_the_line_of_the_program() -> None:
    class Normed(Dense):
        def forward(self, input1: Tensor) -> Tensor:
            return nn.functional.batch_norm(self.fc1(input1), None, None, training=True)

    with pytest.raises(ValueError, match="more than 1 value") as raised:
        ORTModule(Normed())(torch.ones(1, 8))
    (note,) = raised.value.__notes__
    assert __file__ in note
    assert "return nn.functional.batch_norm(self.fc1(input1), None, None, training=True)" in note


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(),
        lambda x: x.permute(0, 0),
        lambda x: x.split([1, 1])[0],
        lambda x: torch.matmul(x, torch.ones(())),
        lambda x: nn.functional.embedding(torch.zeros(2, dtype=torch.int64), x[0]),
        lambda x: nn.functional.interpolate(x[None, None], size=(0, 0)),
    ],
    ids=["clamp", "permute", "split", "matmul", "embedding", "interpolate"],
)
def test_an_error_of_a_kernel_is_a_runtime_error(function: Callable[[Tensor], Tensor]) -> None:
    """Errors are of other classes where torch computes the shapes."""

    class Wrong(Dense):
        def forward(self, input1: Tensor) -> Tensor:
            return function(self.fc1(input1))

    model = Wrong()
    for one in (model, ORTModule(model)):
        with pytest.raises(RuntimeError):
            one(torch.ones(3, 8))
