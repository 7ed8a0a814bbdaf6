"""torch runs the operators of a model that ONNX Runtime refuses, and the reason is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

from ort_dynamo.lowering import registry


@torch.library.custom_op("faults::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: twice(gradient))  # type: ignore[arg-type]


def lower_wrongly(ctx: Any, x: Any) -> Any:
    return ctx.op.Concat(x, axis=7)


@pytest.fixture(autouse=True)
def wrong_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_FROM_OUTSIDE", {})  # of these tests alone: it changes what other tests may store
    registry.register_lowering(torch.ops.faults.twice.default)(lower_wrongly)


def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    before = torch.linalg.matrix_exp(x @ weight)  # torch's, between two islands
    return torch.ops.faults.twice(before.tanh()) + weight


def gradients(function: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_()
    loss = function(torch.eye(3), weight)
    loss.square().sum().backward()
    assert weight.grad is not None
    return loss.detach(), weight.grad


def test_torch_runs_the_island_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    found = gradients(torch.compile(step, backend="ort_train"))
    torch.testing.assert_close(found, gradients(step))
    reasons = [entry for entry in counters["ort_train_eager"] if "refuses the model" in entry]
    assert any(entry.startswith("faults.twice.default: ") and "Concat" in entry for entry in reasons)
    assert counters["ort_train"]["graphs"] == 2  # each is counted once, as it runs
    assert counters["ort_train"]["islands"] >= 1  # the other islands stay
    assert any("ONNX Runtime refuses the model" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize(
    "options", [{"fallback": "error"}, {"session_options": {"log_severity_level": 4}}], ids=["fallback", "settings"]
)
def test_a_program_that_allows_no_fallback_or_sets_the_session_gets_the_error(options: dict[str, Any]) -> None:
    def alone(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.faults.twice(x.sin())

    with pytest.raises(BackendCompilerFailed, match=r"cannot open the inference-.* graph"):
        torch.compile(alone, backend="ort_train", options=options)(torch.ones(3))
