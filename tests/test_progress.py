"""ort_dynamo/progress.py: what a terminal shows of a compile."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
import torch

from ort_dynamo import progress
from ort_dynamo.progress import SWITCH, counted, showing, stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def compile_something() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 3, requires_grad=True)
    torch.compile(lambda x: (x.sin() * 2).sum(), backend="ort_train")(x).backward()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.setattr(progress, "_AFTER", 0.0)

    def run(stream: io.StringIO) -> str:
        monkeypatch.setattr(sys, "stderr", stream)
        compile_something()
        return stream.getvalue()

    return run


def test_a_terminal_shows_the_stages_and_is_clean_in_the_end(shown: Callable[..., str]) -> None:
    text = shown(Terminal())
    for name in (
        "tracing",
        "cutting into forward and backward",
        "asking what ONNX Runtime takes",
        "lowering",
        "rewriting",
        "optimizing in ONNX Runtime",
        "opening in ONNX Runtime",
    ):
        assert name in text
    assert not text.rpartition("\r")[0].rpartition("\r")[2].strip()  # the last line is written over


def test_nothing_is_shown_where_there_is_no_terminal(shown: Callable[..., str]) -> None:
    assert shown(io.StringIO()) == ""


@pytest.mark.parametrize(("name", "value"), [(SWITCH, "0"), ("LOCAL_RANK", "1")])
def test_nothing_is_shown_when_switched_off_or_by_another_process(
    name: str, value: str, shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert shown(Terminal()) == ""


def test_a_short_compile_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AFTER", 600.0)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    compile_something()
    (line,) = stream.getvalue().splitlines()
    assert line == "ort_train: 7 of 7 operators run in ONNX Runtime; ort_dynamo.summary() says more"


def test_nodes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    with showing():
        stage("before")
        assert list(counted("abcd", "letters")) == list("abcd")
        stage("after")
    assert "4" in stream.getvalue()
    assert "/4" in stream.getvalue()


def test_outside_a_compile_there_is_nothing_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    stage("alone")
    assert list(counted("ab", "letters")) == ["a", "b"]
    assert stream.getvalue() == ""


def test_a_failed_compile_leaves_the_terminal_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())

    def fail() -> None:
        with showing():
            stage("failing")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert stream.getvalue().endswith("\r")
