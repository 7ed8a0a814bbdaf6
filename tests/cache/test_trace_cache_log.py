"""The log of TORCH_LOGS=+ort_dynamo about torch's own cache: the reason for each graph that it does not hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from ort_dynamo.listeners import trace_cache
from ort_dynamo.passes.outside import register_pass
from ort_dynamo.torch_internals.aot_cache import AOT_CACHE

pytestmark = pytest.mark.skipif(not AOT_CACHE, reason="this torch keeps nothing of a backend of others")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of the test's own."""
    monkeypatch.setenv("ORT_DYNAMO_CACHE", "1")
    monkeypatch.setenv("ORT_DYNAMO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ORT_DYNAMO_TRACE_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    yield
    torch._dynamo.reset()


class Held:
    """An object of a program's class."""


HELD = Held()


@dataclass(frozen=True)
class OnModels(ir.passes.InPlacePass):
    """A program's pass on ONNX models, which reads an object that has no text."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Change nothing."""
        return ir.passes.PassResult(model, modified=HELD is None)


class OnGraphs(PassBase):
    """A program's pass on FX graphs."""

    def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
        """Change nothing."""
        return PassResult(graph_module, False)


def lines(caplog: pytest.LogCaptureFixture, options: Mapping[str, Any], *inputs: Any) -> list[str]:
    torch._dynamo.reset()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "ort_dynamo"):
        torch.compile(lambda x, y: (x.sin() * y).sum(), backend="ort_train", options=dict(options), dynamic=True)(
            *inputs
        )
    return [one for one in caplog.messages if "trace" in one or "torch's cache" in one]


def test_a_stored_graph_is_read_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert lines(caplog, {}, x, 2) == []
    assert lines(caplog, {}, x, 2) == [
        f"{role} graph: read from torch's cache, with 1 island(s)" for role in ("forward", "backward")
    ]


@pytest.mark.parametrize(
    ("options", "number", "reason"),
    [
        ({"debug": {"trace_cache": False}}, 2, "the cache, or trace_cache, is off"),
        ({"cache": False}, 2, "the cache, or trace_cache, is off"),
        ({"debug": {"verify": True}}, 2, "options save or check each compile"),
        ({}, 0.3, "it has a symbolic float"),
        ({"cuda_graphs": True}, 2, "it is recorded in a CUDA graph"),
    ],
    ids=str,
)
def test_the_reason_is_said(
    options: Mapping[str, Any], number: float, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = lines(caplog, options, torch.ones(2, 3), number)
    assert line == f"this graph is not stored in torch's cache: {reason}"


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (OnModels(), "a function of the program cannot be spelled: "),
        (OnGraphs(), "the program has its own lowerings, or passes on FX graphs"),
    ],
    ids=["models", "graphs"],
)
def test_passes_of_the_program_are_named(own: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    handle = register_pass(own)
    try:
        (line,) = lines(caplog, {}, torch.ones(2, 3), 2)
    finally:
        handle.remove()
    assert reason in line


def test_a_small_program_is_told_apart(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORT_DYNAMO_TRACE_CACHE")
    monkeypatch.setattr(trace_cache, "_seen", 0)
    (line,) = lines(caplog, {}, torch.ones(2, 3), 2)
    assert line.endswith(f"nodes, and below {trace_cache.WORTH_IT} a new trace is faster than torch's key")
