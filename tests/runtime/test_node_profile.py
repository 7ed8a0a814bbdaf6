"""ONNX nodes in the trace of torch's profiler: inside the spans of their sessions, with their modules."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import ort_dynamo
from ort_dynamo.runtime import node_profile


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).sin()


def trace_of(path: Path) -> list[dict[str, Any]]:
    opened: Any = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_nodes_lie_in_the_spans_of_their_sessions(tmp_path: Path, name: str) -> None:
    model, x = Net(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="ort_train")
    with profile(activities=[ProfilerActivity.CPU]) as profiler, ort_dynamo.profile_nodes() as nodes:
        for _ in range(3):
            compiled(x).sum().backward()
    nodes.export_chrome_trace(profiler, tmp_path / name)
    events = trace_of(tmp_path / name)
    spans = [one for one in events if str(one.get("name", "")).startswith("ort_train: ")]
    found = [one for one in events if one.get("cat") == "onnxruntime"]
    forward = [one for one in spans if one["name"].endswith("(forward)") and one["ph"] == "X"]
    assert len(forward) == 3
    sines = [one for one in found if one["name"] == "Sin"]
    assert len(sines) == 3
    for sine, span in zip(sorted(sines, key=lambda one: one["ts"]), forward, strict=True):
        assert span["ts"] <= sine["ts"]
        assert sine["ts"] + sine["dur"] <= span["ts"] + span["dur"]
        assert sine["tid"] == span["tid"]
    modules = {one["args"].get("module") for one in found if "Gemm" in one["name"] or "MatMul" in one["name"]}
    assert "down (Linear)" in modules  # the other one runs with the relu, which the network itself calls
    assert any("test_node_profile.py" in one["args"].get("line", "") for one in sines)


def test_results_are_those_without_a_profile() -> None:
    model, x = Net(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="ort_train")
    expected = compiled(x)
    with profile(activities=[ProfilerActivity.CPU]), ort_dynamo.profile_nodes():
        assert torch.equal(compiled(x), expected)
    assert node_profile.node_profile() is None


def test_without_torchs_profiler_nothing_is_opened() -> None:
    compiled, x = torch.compile(Net(), backend="ort_train"), torch.randn(3, 4)
    with ort_dynamo.profile_nodes() as nodes:
        compiled(x)
        assert not nodes._graphs


def test_an_error_in_a_session_is_raised_as_ever(tmp_path: Path) -> None:
    compiled = torch.compile(lambda table, rows: table[rows] * 2, backend="ort_train")
    table, rows = torch.randn(4, 2), torch.tensor([1, 7])
    with profile(activities=[ProfilerActivity.CPU]) as profiler, ort_dynamo.profile_nodes() as nodes:
        with pytest.raises(IndexError):
            compiled(table, rows)
        compiled(table, rows.clamp(max=3))
    nodes.export_chrome_trace(profiler, tmp_path / "trace.json")
    assert trace_of(tmp_path / "trace.json")
