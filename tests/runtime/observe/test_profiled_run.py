"""A session under ONNX Runtime's profiler records the time of each node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ort_dynamo.cache.open_island import OpenedIsland
from ort_dynamo.compilation.events import GraphCompilation, Listener, observed
from ort_dynamo.runtime.observe.profiled_run import NodeTime, Profile, ProfiledGraph, read_profile


class Keep(Listener):
    def __init__(self, kept: list[tuple[GraphCompilation, OpenedIsland]]) -> None:
        self.kept = kept

    def opened(self, graph: GraphCompilation) -> None:
        self.kept += [(graph, island) for island in graph.islands.values()]


def test_a_profiled_graph_computes_the_same_and_tells_its_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    kept: list[tuple[GraphCompilation, OpenedIsland]] = []
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1)), torch.randn(3, 4)
    with torch.no_grad(), observed(lambda: Keep(kept)):
        torch.compile(model, backend="ort_train")(x)
    ((graph, island),) = kept
    profiled = ProfiledGraph(island.compiled.built, graph.target, graph.device)
    weight, bias = model[0].weight.detach(), model[0].bias.detach()
    by_shape = {(8, 4): weight, (8,): bias, (3, 4): x}
    gm = graph.segmented.islands["island_0"]
    inputs = [by_shape[tuple(node.meta["val"].shape)] for node in gm.graph.find_nodes(op="placeholder")]
    for _ in range(3):
        (result,) = profiled.run(*inputs)
    torch.testing.assert_close(result, model(x).detach())
    found = profiled.close()
    assert "Softmax" in {node.op_type for node in found.nodes}
    assert all(node.seconds >= 0 for node in found.nodes)
    assert not list(tmp_path.glob("ort_dynamo-*"))


def event(name: str, took: int, index: int = 0, op_type: str = "Add", begins: int = 0, **told: str) -> dict[str, Any]:
    return {"name": name, "ts": begins, "dur": took, "args": {"op_name": op_type, "node_index": str(index), **told}}


def test_the_first_runs_do_not_count() -> None:
    events = [event("a_kernel_time", took) for took in (1000, 2, 4, 6)]
    assert read_profile(events, 1) == Profile((NodeTime("a", "Add", 4e-6),), None)
    assert read_profile(events[:1], 1).nodes == (NodeTime("a", "Add", 1e-3),)


def test_nodes_of_one_name_are_told_apart() -> None:
    events = [event("a_kernel_time", 2, 0), event("a_kernel_time", 4, 1), event("a_fence_before", 9)]
    assert [node.seconds for node in read_profile(events, 0).nodes] == [2e-6, 4e-6]


def test_bytes_in_use_are_told_where_onnx_runtime_tells_them() -> None:
    events = [
        event("a_kernel_time", 1, mem_bytes_in_use="300", mem_in_use_delta="200"),
        event("b_kernel_time", 1, mem_bytes_in_use="900", mem_in_use_delta="600"),
        event("c_kernel_time", 1, mem_bytes_in_use="500", mem_in_use_delta="-400"),
    ]
    assert read_profile(events, 0).in_use == (100, 900)


def test_the_time_of_nodes_inside_another_counts_once() -> None:
    events = [
        event("before_kernel_time", 10, begins=0),
        event("inner_kernel_time", 30, begins=12),
        event("deep_kernel_time", 20, begins=46),
        event("loop_kernel_time", 25, op_type="Loop", begins=44),
        event("if_kernel_time", 60, op_type="If", begins=10),
        event("after_kernel_time", 5, begins=70),
    ]
    seconds = {node.name: round(node.seconds * 1e6) for node in read_profile(events, 0).nodes}
    assert seconds == {"before": 10, "inner": 30, "deep": 20, "loop": 5, "if": 5, "after": 5}
