"""Tests of exceptions that a signal handler of the program raises while ONNX Runtime is called."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch

from ort_dynamo.runtime.installed import importing


class TimeLimitError(Exception):
    """Raised by a handler of the program."""


def stop(*_: object, **__: object) -> NoReturn:
    raise TimeLimitError


@pytest.fixture
def timer() -> Iterator[None]:
    """The alarm raises TimeLimitError."""
    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_exception_while_a_session_is_opened_is_no_refusal_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing.onnxruntime(), "InferenceSession", stop)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        torch.compile(torch.sin, backend="ort_train")(torch.ones(2))
    assert isinstance(raised.value.inner_exception, TimeLimitError)


@pytest.mark.usefixtures("timer")
def test_an_exception_while_a_session_runs_is_raised_as_it_is() -> None:
    compiled = torch.compile(lambda x: x @ x @ x @ x, backend="ort_train")
    x = torch.rand(1200, 1200)
    compiled(x)

    def run_until_stopped() -> NoReturn:
        while True:
            compiled(x)

    signal.setitimer(signal.ITIMER_REAL, 0.02)
    with pytest.raises(TimeLimitError):
        run_until_stopped()
