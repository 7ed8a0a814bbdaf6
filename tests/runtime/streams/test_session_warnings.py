"""Tests of warnings that opening a session on CUDA does not print."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_streams import FakeCuda
from stream_graphs import NEG, built

from ort_dynamo.errors import SessionError
from ort_dynamo.options.groups import SessionOptions
from ort_dynamo.runtime import session
from ort_dynamo.runtime.installed import importing, providers, severity
from ort_dynamo.runtime.session import open_session
from ort_dynamo.runtime.streams import SessionStream
from ort_dynamo.runtime.torch_memory import TORCH_MEMORY


class Severities:
    """ONNX Runtime, as far as it opens sessions: notes each severity of the default logger, and each session opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.notes: list[object] = []

        def session_opens(*_: Any, **__: Any) -> Any:
            self.notes.append("session")
            if fails:
                raise RuntimeError("no such device")
            return SimpleNamespace(get_providers=lambda: ["CUDAExecutionProvider"])

        module = SimpleNamespace(**vars(importing.onnxruntime()))
        module.InferenceSession, module.set_default_logger_severity = session_opens, self.notes.append
        for user in (session, severity):
            monkeypatch.setattr(user, "onnxruntime", lambda: module)
        monkeypatch.setattr(TORCH_MEMORY, "register", lambda *_: None)
        monkeypatch.setattr(SessionStream, "hold", lambda *_: None)
        monkeypatch.setattr(session, "keep_alive_at_exit", lambda _: None)

    def of(self, index: int, **given: Any) -> list[object]:
        graph = dataclasses.replace(built(NEG), session=SessionOptions(**given).resolved(on_cuda=True))
        open_session(graph, providers.recorded_cuda_targets()[-1], torch.device("cuda", index))
        return self.notes


def test_no_warning_is_printed_for_a_session_that_names_its_device(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Severities(monkeypatch).of(1) == [3, "session", 2]


def test_the_default_logger_is_let_alone_where_nothing_is_to_be_silenced(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Severities(monkeypatch).of(0) == ["session"]
    assert Severities(monkeypatch).of(1, session_options={"log_severity_level": 0}) == ["session"]


def test_warnings_are_back_after_a_session_that_does_not_open(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Severities(monkeypatch, fails=True)
    with pytest.raises(SessionError, match="no such device"):
        found.of(1)
    assert found.notes == [3, "session", 2]


def test_warnings_are_back_when_the_last_of_several_sessions_is_open(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Severities(monkeypatch)
    with severity.errors_only():
        found.of(1)
        assert found.notes == [3, 3, "session"]
    assert found.notes[-1] == 2
