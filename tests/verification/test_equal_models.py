"""Models that are right are found equal to eager mode, and are left as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ort_dynamo
from ort_dynamo import backend
from ort_dynamo.backend import ort_train
from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.verification import verify as verifying
from ort_dynamo.verification.result import Verification


def checked(model: Any, *args: Any, **given: Any) -> Verification:
    """Verify, and check that a call is found equal and that graphs were compiled for it."""
    result = ort_dynamo.verify(model, *args, **given)
    assert result.ok, str(result)
    assert result.graphs
    assert result.fault is None
    assert str(result).startswith(f"Equal to eager mode: {result.compared} values")
    return result


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 3))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2)
        self.norm, self.pool = nn.BatchNorm2d(8), nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.pool(self.norm(self.one(x)).relu())).flatten(1).logsumexp(1)


class Words(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.embedding(ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Counts(nn.Module):
    """Writes buffers in place, replaces buffers, and counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))
        self.weight = nn.Parameter(torch.ones(3))
        self.calls, self.seen = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.total += x.detach().sum(0)
        self.last = x.detach()[0] * 2
        return (x * self.weight + self.total).sin()


class Broken(nn.Module):
    """Has a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x).tanh()
        torch._dynamo.graph_break()
        return self.two(x).sigmoid()


class Branches(nn.Module):
    """Chooses one of two layers by its data; eager mode has no gradients of torch.cond without a compile."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.one(x).sin(), lambda x: self.two(x).cos(), (x,))


def rows(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """Take a view whose size depends on data."""
    return x[: int(where.sum())].exp() + x.new_zeros(()).add_(1)


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (perceptron, lambda: (torch.randn(6, 8),)),
        (Convolutions, lambda: (torch.randn(2, 3, 9, 9),)),
        (Words, lambda: (torch.randint(11, (2, 5)),)),
        (Counts, lambda: (torch.randn(4, 3, requires_grad=True),)),
        (Broken, lambda: (torch.randn(3, 4),)),
        (Branches, lambda: (torch.ones(3, 4),)),
    ],
)
def test_a_model_that_trains(model: Callable[[], nn.Module], inputs: Callable[[], Any], placement: str) -> None:
    checked(model(), *inputs(), options={"placement": placement})


def test_keywords_and_a_loss() -> None:
    ids = torch.randint(11, (2, 5))
    result = checked(Words(tied=True), ids, labels=ids)
    assert result.compared > 20


def test_a_model_in_eval_mode_stays_so() -> None:
    model = perceptron().eval()
    checked(model, torch.randn(6, 8))
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    checked(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)).to(dtype), torch.randn(6, 8, dtype=dtype))


def test_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        checked(Words(), torch.randint(11, (2, 5)))


def test_frozen_parameters_and_no_gradients() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    checked(model, torch.randn(6, 8))
    with torch.no_grad():
        assert checked(model, torch.randn(6, 8)).graphs == 1


def test_a_function_with_data_dependent_sizes() -> None:
    checked(rows, torch.randn(5, 3, requires_grad=True), torch.tensor([1, 0, 1, 1]))


def test_a_function_names_the_gradients_of_models_that_it_reads() -> None:
    model = perceptron()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    assert checked(loss, torch.randn(6, 8)).compared > 6


def test_inputs_that_the_model_writes_are_compared_and_stay() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x.t() + 1

    x = torch.ones(2, 3)
    checked(write, x)
    assert torch.equal(x, torch.ones(2, 3))


def test_nothing_is_changed(tmp_path: Path) -> None:
    model, x = Counts(), torch.randn(4, 3)
    model(x).sum().backward()
    total, last, weight = model.total, model.last, model.weight
    before, gradient = copy.deepcopy(model.state_dict()), model.weight.grad
    assert gradient is not None
    numbers, generator, attributes = gradient.clone(), torch.get_rng_state(), list(vars(model))
    checked(model, x, folder=tmp_path / "faults")
    assert (model.total is total, model.last is last, model.weight is weight) == (True, True, True)
    assert model.weight.grad is gradient
    assert torch.equal(gradient, numbers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (model.calls, model.seen, list(vars(model))) == (1, [1], attributes)
    assert not (tmp_path / "faults").exists()


def test_compiled_code_stays_and_its_options_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = []
    real = backend.compile_recorded
    monkeypatch.setattr(backend, "compile_recorded", lambda *given: compiles.append(1) or real(*given))
    model, x = perceptron(), torch.randn(6, 8)
    compiled = torch.compile(model, backend="ort_train", options={"placement": "onnxruntime", "fallback": "error"})
    compiled(x).sum().backward()
    seen = []
    parse = verifying.parse_options
    monkeypatch.setattr(verifying, "parse_options", lambda *given: seen.append(given) or parse(*given))
    records = str(ort_dynamo.summary())
    checked(compiled, x)
    assert seen == [(None, {"placement": "onnxruntime", "fallback": "error"})]
    assert str(ort_dynamo.summary()) == records
    compiled(x).sum().backward()
    assert compiles == [1], "the compiled model runs as it did"


def test_a_model_compiled_in_place() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).tanh()

    model = Plain()
    model.compile(backend="ort_train", options={"placement": "onnxruntime"})
    call = model._compiled_call_impl
    checked(model, torch.randn(2, 3))
    assert model._compiled_call_impl is call
    function = torch.compile(lambda x: x.sin(), backend="ort_train")
    checked(function, torch.randn(3, requires_grad=True))


def test_a_model_of_another_backend_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the backend of this one is aot_eager"):
        ort_dynamo.verify(torch.compile(perceptron(), backend="aot_eager"), torch.randn(6, 8))
    compiled = torch.compile(perceptron(), backend="ort_train")
    with pytest.raises(InvalidArgumentError, match="none for a compiled model"):
        ort_dynamo.verify(compiled, torch.randn(6, 8), options={})


def test_a_model_compiled_by_the_backend_s_function_is_one_of_ort_train() -> None:
    checked(torch.compile(perceptron(), backend=ort_train), torch.randn(6, 8))


def test_a_call_without_graphs_says_so() -> None:
    hidden = torch._dynamo.disable(torch.sin)

    def call(x: torch.Tensor) -> torch.Tensor:
        return hidden(x)

    result = ort_dynamo.verify(call, torch.ones(2))
    assert result.graphs == 0
    assert "all of it ran in eager mode" in str(result)
