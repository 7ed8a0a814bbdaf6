"""ONNX nodes in the trace of torch's profiler: inside the spans of their sessions, with their modules."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from torch import nn
from torch.profiler import ProfilerActivity, profile

import ort_dynamo
from ort_dynamo.runtime.observe import node_profile, profiled_run
from ort_dynamo.runtime.observe.profiled_run import ProfiledGraph


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


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("trace.json", nullcontext),
        ("trace.json.gz", nullcontext),
        pytest.param("trace.json", ort_dynamo.collect_statistics, id="with statistics"),
    ],
)
def test_nodes_lie_in_the_spans_of_their_sessions(tmp_path: Path, name: str, beside: Callable[[], Any]) -> None:
    model, x = Net(), torch.randn(3, 4)
    compiled = torch.compile(model, backend="ort_train")
    with profile(activities=[ProfilerActivity.CPU]) as profiler, ort_dynamo.profile_nodes() as nodes, beside():
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
    assert operators(trace_of(tmp_path / "trace.json")) == {"Gather": 2, "Mul": 1}


def operators(events: list[dict[str, Any]]) -> Counter[str]:
    return Counter(one["name"] for one in events if one.get("cat") == "onnxruntime")


def only(nodes: node_profile.NodeProfile) -> ProfiledGraph:
    """Give the session that is profiled."""
    (found,) = nodes._graphs.values()
    return found.graph


def doubled() -> Callable[[torch.Tensor], torch.Tensor]:
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(lambda x: x.sin() * 2, backend="ort_train")
    return compiled


def stopped_before_it_begins(*_: object) -> Any:
    raise MemoryError


def test_runs_beside_one_that_does_not_reach_the_session_are_in_the_trace() -> None:
    compiled, x = doubled(), torch.randn(3)
    with profile(activities=[ProfilerActivity.CPU]), ort_dynamo.profile_nodes() as nodes:
        compiled(x)
        run = only(nodes).run
        only(nodes).run = stopped_before_it_begins
        with pytest.raises(MemoryError):
            compiled(x)
        only(nodes).run = run
        compiled(x)
    assert operators(nodes._events) == {"Sin": 2, "Mul": 2}


def test_a_session_whose_runs_cannot_be_told_apart_is_named(caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(lambda table, rows: table[rows] * 2, backend="ort_train")
    table, rows = torch.randn(4, 2), torch.tensor([1, 7])
    with profile(activities=[ProfilerActivity.CPU]), ort_dynamo.profile_nodes() as nodes:
        with pytest.raises(IndexError):
            compiled(table, rows)
        only(nodes).run = stopped_before_it_begins
        with pytest.raises(MemoryError):
            compiled(table, rows)
    assert not nodes._events
    (record,) = (one for one in caplog.records if one.name == node_profile.__name__)
    assert record.levelname == "WARNING"
    assert "its profile has 1 runs, and 0 of 2 came to their end" in record.message


def test_a_run_of_another_thread_ends_before_the_profile_does() -> None:
    compiled, x = doubled(), torch.randn(3)
    has_begun, may_go_on, is_over = threading.Event(), threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def runs() -> None:
        compiled(x)
        assert is_over.wait(10)
        results.append(compiled(x))

    with profile(activities=[ProfilerActivity.CPU]):
        with ort_dynamo.profile_nodes() as nodes:
            compiled(x)
            run = only(nodes).run

            def late(*values: Any) -> Any:
                has_begun.set()
                assert may_go_on.wait(10)
                return run(*values)

            only(nodes).run = late
            thread = threading.Thread(target=runs)
            thread.start()
            assert has_begun.wait(10)
            threading.Timer(0.3, may_go_on.set).start()
        is_over.set()
        thread.join()
    assert operators(nodes._events) == {"Sin": 2, "Mul": 2}
    assert torch.equal(results[0], compiled(x))


def test_the_error_of_the_program_is_raised_if_the_profile_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_profile(_: str) -> None:
        raise ValueError("no JSON")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiled, x = doubled(), torch.randn(3)
    compiled(x)
    before = {*tmp_path.iterdir()}
    found: list[node_profile.NodeProfile] = []

    def program() -> None:
        with ort_dynamo.profile_nodes() as nodes:
            found.append(nodes)
            compiled(x)
            monkeypatch.setattr(json, "loads", no_profile)
            raise KeyError("of the program")

    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(KeyError, match="of the program"):
        program()
    monkeypatch.undo()
    assert not found[0]._graphs
    assert before == {*tmp_path.iterdir()}
    (record,) = (one for one in caplog.records if one.name == node_profile.__name__)
    assert (record.levelname, "no ONNX nodes of" in record.message) == ("WARNING", True)


def test_a_session_that_does_not_open_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiled, x = doubled(), torch.randn(3)
    compiled(x)
    before = {*tmp_path.iterdir()}
    monkeypatch.setattr(profiled_run, "open_session", stopped_before_it_begins)
    with pytest.raises(MemoryError), profile(activities=[ProfilerActivity.CPU]), ort_dynamo.profile_nodes():
        compiled(x)
    assert before == {*tmp_path.iterdir()}


_FORKS = """
import os, signal, sys, threading, warnings
import torch
from torch.profiler import ProfilerActivity, profile
import ort_dynamo
from ort_dynamo.runtime import boxed
from ort_dynamo.runtime.observe import observed_run

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn of threads in a process that forks
compiled = torch.compile(lambda x: x.sin() * 2, backend="ort_train", options={"threads": 1})
x = torch.randn(3)
expected = compiled(x)


def forked(*locks):
    is_held, may_end = threading.Event(), threading.Event()

    def hold():
        for lock in locks:
            lock.acquire()
        is_held.set()
        may_end.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)
        return True
    may_end.set()
    thread.join()
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    return False


with ort_dynamo.collect_statistics():
    compiled(x)
    (watch,) = boxed._watches
    is_child = forked(watch.lock) if sys.argv[1] == "watch" else forked(observed_run._lock)
    assert torch.equal(compiled(x), expected)
    with ort_dynamo.collect_statistics() as inside:
        assert torch.equal(compiled(x), expected)
    assert {"aten.sin.default", "aten.mul.Tensor"} <= {one.overload for one in inside.statistics}
if is_child:
    os._exit(0)
with profile(activities=[ProfilerActivity.CPU]):
    with ort_dynamo.profile_nodes() as nodes:
        compiled(x)
        is_child = forked(nodes._changed)
        assert torch.equal(compiled(x), expected)
    if is_child:
        os._exit(0)
assert {one["name"] for one in nodes._events} == {"Sin", "Mul"}
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("held", ["watch", "sessions"])
def test_a_fork_while_another_thread_holds_a_lock_stops_nothing(held: str) -> None:
    result = run_program(_FORKS, held, timeout=120)
    assert result.stdout.strip() == "done", result.stderr
