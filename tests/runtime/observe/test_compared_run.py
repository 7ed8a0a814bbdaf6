"""With verify_sessions, each session runs beside one on the CPU without ONNX Runtime's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ort_dynamo.errors import SessionsDifferError
from ort_dynamo.runtime import compiled_graph
from ort_dynamo.runtime.observe import compared_run
from ort_dynamo.runtime.observe.compared_run import _difference

OPTIONS = {"debug": {"verify_sessions": True}, "placement": "onnxruntime"}


def test_a_model_whose_sessions_are_right_trains() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 2))
    compiled = torch.compile(model, backend="ort_train", options=OPTIONS)
    x = torch.randn(3, 4)
    for _ in range(2):
        torch.manual_seed(1)
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        torch.manual_seed(1)
        found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
        for ours, eager in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, eager)


def test_a_result_that_differs_is_named_with_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiled_graph._open_reference

    def wrong(built: Any) -> Any:
        run = real(built).run
        return lambda *values: [result * 1.01 for result in run(*values)]

    monkeypatch.setattr(compiled_graph, "_open_reference", wrong)
    compiled = torch.compile(lambda x: (x.sin() + 1).exp(), backend="ort_train", options=OPTIONS)
    with pytest.raises(SessionsDifferError) as caught:
        compiled(torch.ones(3))
    said = str(caught.value)
    assert "Result 0 of the inference-" in said
    assert "0.063 apart, largest 6.4" in said
    assert "= Exp(" in said
    assert "# exp: aten.exp.default" in said


def test_no_reference_is_opened_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_graph, "compared", None)
    torch.compile(torch.sin, backend="ort_train", options={"placement": "onnxruntime"})(torch.ones(3))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ([1.0, NAN, INF], [1.0, NAN, INF], ""),
        ([1.0, 2.0], [1.0, 2.0001], ""),
        ([1.0, 2.0], [1.0, 2.1], "0.1 apart, largest 2.1"),
        ([1.0, NAN], [1.0, 2.0], "NaN in 1 and 0 of 2 places"),
        ([1.0, INF], [1.0, -INF], "infinities in other places"),
        ([1.0, INF], [1.0, 5.0], "infinities in other places"),
        ([0.0, 0.0], [0.0, 0.0], ""),
        ([], [], ""),
        ([[1.0]], [1.0], "shapes (1, 1) and (1,)"),
    ],
)
def test_differences_beyond_the_tolerance_are_described(one: Any, other: Any, said: str) -> None:
    assert _difference(torch.tensor(one), torch.tensor(other)) == said


def test_a_hundredth_of_the_integers_may_differ() -> None:
    numbers = torch.arange(1000)
    assert not _difference(numbers, numbers.where(numbers > 9, 7))
    assert _difference(numbers, numbers.where(numbers > 19, -1)) == "2.0% of its numbers"
    assert compared_run._OTHERS == 0.01
