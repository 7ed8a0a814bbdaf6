"""Fallbacks and a model mostly in torch are logged once, and again after a reset."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.utils import counters

import ort_dynamo
from ort_dynamo.report import counts
from ort_dynamo.report.counts import report
from ort_dynamo.report.record import GraphRecord


@torch.library.custom_op("ort_dynamo_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_reset_lets_warnings_come_again(caplog: pytest.LogCaptureFixture) -> None:
    said = []
    with caplog.at_level(logging.WARNING, logger="ort_dynamo"):
        for _ in range(2):
            torch._dynamo.reset()
            for shape in ((3,), (3, 2)):
                torch.compile(lambda x: halve(x) + 1, backend="ort_train", dynamic=False)(torch.ones(shape))
            said.append(sum("ort_dynamo_tests.halve" in record.getMessage() for record in caplog.records))
    assert said == [1, 2]


def spectral(x: torch.Tensor) -> torch.Tensor:
    z = torch.fft.rfft(x) * 2j
    z = z.exp() + z.conj().sin() + z.cos()
    return torch.fft.irfft(z).sum()


def test_operators_that_have_one_reason_share_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(4, 8)
    with caplog.at_level(logging.WARNING, logger="ort_dynamo"):
        compiled = torch.compile(spectral, backend="ort_train")
        compiled(x)
        compiled(x[:2])
    said = [one for one in caplog.messages if "torch.complex64 has no ONNX Runtime tensor" in one]
    assert len(said) == 1
    first, *lines, _ = said[0].splitlines()
    assert first.startswith("ort_train: aten._fft_r2c.default, ")
    assert " others run in eager (fallback), not in ONNX Runtime, in the inference graph: dtype " in first
    assert 1 < len(lines) == len(set(lines)) <= 4
    assert all(line.startswith("  File ") for line in lines)


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 8), nn.ReLU(), nn.Linear(8, 2))


def compiled(model: nn.Module, **options: Any) -> None:
    """Compile and run a forward and a backward, and a graph for inference."""
    step, x = torch.compile(model, backend="ort_train", options=options), torch.randn(2, 3, 8, 8)
    step(x).sum().backward()
    with torch.no_grad():
        step(x)


def said_of_the_choice(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one for one in caplog.messages if "by choice" in one]


def test_a_model_that_torch_runs_by_choice_is_said_in_one_line_until_a_reset(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ort_dynamo"):
        for times in (1, 2):
            torch._dynamo.reset()
            for _ in range(2):
                compiled(conv_net(), fallback="error")
            assert len(said_of_the_choice(caplog)) == times
    (line, _) = said_of_the_choice(caplog)
    assert "\n" not in line
    assert line.startswith("ort_train: torch runs ")
    assert " operators of the forward graph by choice, since it is faster (aten.convolution.default: " in line
    assert line.endswith('Set options={"placement": "onnxruntime"} to run them in ONNX Runtime.')


def test_an_operator_that_torch_runs_alone_has_its_own_reason_in_the_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ort_dynamo"):
        torch.compile(lambda x: x.cumprod(-1), backend="ort_train")(torch.ones(64, 64))
    (line,) = said_of_the_choice(caplog)
    assert "torch runs 1 of 1 operators of the inference graph" in line
    assert "(aten.cumprod.default: ONNX Runtime takes " in line


@pytest.mark.parametrize(("model", "placement"), [(mlp, "fastest"), (conv_net, "onnxruntime")])
def test_a_model_in_sessions_has_no_such_line(model: Any, placement: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ort_dynamo"):
        compiled(model(), placement=placement)
    assert not caplog.messages


def test_one_operator_among_many_makes_no_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ort_dynamo"):
        report_of(native=2, chosen=2)
        assert not caplog.messages
        report_of(native=2, chosen=3)
    assert "torch runs 3 of 5 operators of the forward graph" in caplog.text


def report_of(native: int, chosen: int) -> None:
    nodes = Counter(native=native), Counter[str](), Counter({"aten.mul.Tensor: a reason": chosen})
    report(GraphRecord("forward", *nodes, eager=(), islands=(), passes=(), seconds=0.0))


def test_the_log_the_summary_and_the_counters_have_the_same_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ort_dynamo.report.counts"), torch.no_grad():
        torch.compile(conv_net(), backend="ort_train")(torch.randn(2, 3, 8, 8))
    (numbers,) = (one.partition(": ")[2] for one in caplog.messages if one.startswith("inference graph"))
    assert f"nodes: {numbers}\n" in str(ort_dynamo.summary())
    assert f"{counters['ort_train']['chosen_nodes']} in torch by choice (placement), 0 in eager (fallback)" in numbers


@pytest.mark.parametrize("terminal", [True, False])
def test_the_first_compile_says_how_much_runs_in_onnx_runtime(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counts, "is_shown", lambda: terminal)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    torch.compile(model, backend="ort_train")(torch.ones(2, 4)).sum().backward()
    torch.compile(lambda x: x @ x, backend="ort_train")(torch.ones(2, 2))
    said = [line for line in capsys.readouterr().err.splitlines() if "operators run in ONNX Runtime" in line]
    native = counters["ort_train"]["native_nodes"] - 1  # the second compile is not said
    line = f"ort_train: {native} of {native + 1} operators run in ONNX Runtime; 1 in torch by design"
    assert said == ([f"{line} (random numbers of dropout); ort_dynamo.summary() says more"] if terminal else [])
    torch._dynamo.reset()
    torch.compile(lambda x: x @ x, backend="ort_train")(torch.ones(2, 2))
    assert ("1 of 1 operators" in capsys.readouterr().err) == terminal


def test_the_first_compile_says_why_not_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counts, "is_shown", lambda: True)
    torch.compile(nn.Conv2d(3, 8, 3), backend="ort_train")(torch.ones(4, 3, 64, 64)).sum().backward()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "operators run in ONNX Runtime" in line]
    assert "in torch by choice (placement), which options={'placement': 'onnxruntime'} changes" in line
    torch._dynamo.reset()
    torch.compile(lambda x: torch.linalg.svd(x)[1], backend="ort_train")(torch.ones(3, 3))
    assert "1 in eager (fallback), as the warnings say" in capsys.readouterr().err


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def test_an_lstm_in_eager_is_said_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counts, "is_shown", lambda: True)
    for backend in ("eager", "ort_train", "ort_train"):
        model = torch.compile(Recurrent(), backend=backend)
        model(torch.ones(2, 1, 3))
        torch._dynamo.reset_code_caches()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ort_train: Recurrent")]
    assert "Recurrent.forward (" in line
    assert __file__ in line
    assert "torch._dynamo.config.allow_rnn = True" in line


def test_the_recompile_limit_is_said_on_the_terminal_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counts, "is_shown", lambda: True)
    with torch._dynamo.config.patch(recompile_limit=2):
        for width in range(2, 7):
            torch.compile(nn.Sequential(nn.Linear(width, 2)), backend="ort_train")(torch.ones(1, width))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ort_train: Sequential")]
    assert "torch._dynamo.config.recompile_limit (2) is reached" in line


def test_the_first_warning_of_a_fallback_names_the_next_step(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: torch.linalg.svd(x).S.sum() + torch.fft.fft(x).real, backend="ort_train")(torch.ones(2, 2))
    warned = [
        one.getMessage() for one in caplog.records if "(fallback)" in one.getMessage() and one.levelname == "WARNING"
    ]
    assert len(warned) > 1
    assert ["help troubleshooting" in one for one in warned] == [True] + [False] * (len(warned) - 1)


def test_warnings_say_who_speaks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ort_dynamo"):
        torch.compile(lambda x: halve(x) + 1, backend="ort_train")(torch.ones(3))
    assert caplog.messages
    assert all(message.startswith("ort_train: ") for message in caplog.messages)


def singular_values(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svd(x.sin())[1] + torch.linalg.svd(x.cos())[1]


ERRORS = [(nn.Sequential(nn.Linear(3, 2)), {"memory_budget": 2}), (singular_values, {"fallback": "error"})]


@pytest.mark.parametrize(("function", "options"), ERRORS)
def test_a_compile_error_comes_without_a_line_that_something_runs_in_eager(
    function: Any,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(counts, "is_shown", lambda: True)
    with caplog.at_level(logging.WARNING, logger="ort_dynamo"), pytest.raises(BackendCompilerFailed):
        torch.compile(function, backend="ort_train", options=options)(torch.ones(3, 3))
    assert "ort_train" not in capsys.readouterr().err
    assert caplog.messages == []
    assert ort_dynamo.summary().skipped == ()
    assert not counters["ort_train_eager"]


@pytest.mark.parametrize(("function", "options"), ERRORS)
def test_a_compile_error_that_torch_suppresses_is_said_with_its_cause(
    function: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counts, "is_shown", lambda: True)
    with torch._dynamo.config.patch(suppress_errors=True):
        torch.compile(function, backend="ort_train", options=options)(torch.ones(3, 3))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ort_train: ")]
    (skipped,) = ort_dynamo.summary().skipped
    cause = "InvalidOptionError: ort_train option 'memory_budget'" if "memory_budget" in options else "FallbackRefused"
    assert " runs in eager, and the functions that it calls may be compiled: backend='ort_train' raised: " in line
    assert cause in line
    assert cause in skipped.reason


def test_a_graph_break_that_torch_raises_is_not_said_to_run_in_eager(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counts, "is_shown", lambda: True)
    with pytest.raises(Unsupported):
        torch.compile(Recurrent(), backend="ort_train", fullgraph=True)(torch.ones(2, 1, 3))
    assert "ort_train" not in capsys.readouterr().err
    assert ort_dynamo.summary().skipped == ()
