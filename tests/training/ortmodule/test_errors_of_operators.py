"""Errors of operators that refuse their inputs are those of eager mode."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable

import pytest
import torch
from small_models import Dense
from torch import Tensor, nn

from ort_dynamo import ORTModule
from ort_dynamo.torch_internals.tracing.dynamo import counters
from ort_dynamo.training.ortmodule import ORTModuleTorchModelException


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
    lines = "".join(traceback.format_exception(raised.value))
    assert "return nn.functional.batch_norm(self.fc1(input1), None, None, training=True)" in lines
    assert "dynamo.exc" not in lines


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(),
        lambda x: x.permute(0, 0),
        lambda x: x.split([1, 1])[0],
        lambda x: torch.matmul(x, torch.ones(())),
        lambda x: nn.functional.embedding(torch.zeros(2, dtype=torch.int64), x[0]),
        lambda x: nn.functional.interpolate(x[None, None], size=(0, 0)),
        lambda x: x[:0].amax(0),
        lambda x: nn.functional.unfold(x[0, 0, None, None], 2),
        lambda x: torch.cat([]),
    ],
    ids=["clamp", "permute", "split", "matmul", "embedding", "interpolate", "amax", "unfold", "cat"],
)
def test_a_wrong_call_raises_eagers_error_and_the_next_one_runs(function: Callable[[Tensor], Tensor]) -> None:
    class Wrong(Dense):
        wrong = True

        def forward(self, input1: Tensor) -> Tensor:
            return function(self.fc1(input1)) if self.wrong else self.fc1(input1)

    model, given = Wrong(), torch.ones(3, 8)
    with pytest.raises(Exception) as eager:
        model(given)
    module = ORTModule(model)
    with pytest.raises(Exception) as raised:
        module(given)
    assert (type(raised.value), str(raised.value)) == (type(eager.value), str(eager.value))
    model.wrong = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(given).sum().backward()
    assert counters["ort_train"]["graphs"] >= 2


@torch.library.custom_op("ort_dynamo_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return x.square()


@without_fake.register_fake
def _(x: Tensor) -> Tensor:
    raise AssertionError("a shape function that is wrong")


def test_a_model_that_eager_runs_and_dynamo_does_not_trace_runs_in_pytorch() -> None:
    class Opaque(Dense):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, input1: Tensor) -> Tensor:
            self.calls += 1
            return without_fake(self.fc1(input1))

    torch.manual_seed(0)
    model, given = Opaque(), torch.randn(3, 8)
    module = ORTModule(copy.deepcopy(model))
    with pytest.warns(UserWarning, match="(?s)Fallback to PyTorch.*ORTModuleTorchModelException"):
        found = module(given)
    torch.testing.assert_close(found, model(given))
    assert module.calls == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(given)


def test_without_a_policy_a_model_that_dynamo_does_not_trace_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")

    class Opaque(Dense):
        def forward(self, input1: Tensor) -> Tensor:
            return without_fake(self.fc1(input1))

    with pytest.raises(ORTModuleTorchModelException, match="shape function that is wrong"):
        ORTModule(Opaque())(torch.ones(3, 8))
