"""torch's profiler shows each run of a session; a call without a profiler checks one flag."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.profiler import ProfilerActivity, profile

import ort_dynamo  # noqa: F401  registers the backend
from ort_dynamo.errors import IndexOutOfBoundsError
from ort_dynamo.runtime.boxed import Island, RunWatch, boxed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def spans(run: Callable[[], Any]) -> list[str]:
    """The spans of this backend's in a profile of `run`, in the order in which they begin."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    found = [event for event in recorded.events() or () if event.name.startswith("ort_train: ")]
    return [event.name for event in sorted(found, key=lambda event: event.time_range.start)]


def island(run: Callable[..., Any], covers: str) -> Island:
    """An island of one result that calls `run` in the place of a session."""

    class Compiled:
        def __init__(self) -> None:
            self.run = run
            self.built = type("Built", (), {"outputs": (None,)})()

    return Island(Compiled(), {}, covers)  # type: ignore[arg-type]


def in_a_row(*islands: Island) -> Callable[[list[Any]], Any]:
    """Islands that take one tensor, one after another, as a boxed function."""
    graph = Graph()
    value = graph.placeholder("x")
    for index in range(len(islands)):
        value = graph.call_function(lambda pair: pair[0], (graph.call_module(f"island_{index}", (value,)),))
    graph.output((value,))
    return boxed(GraphModule({f"island_{index}": one for index, one in enumerate(islands)}, graph))


def test_forward_and_backward_are_shown_with_their_modules() -> None:
    step = torch.compile(Net(4), backend="ort_train")
    x = torch.randn(3, 4)
    step(x).sum().backward()
    assert spans(lambda: step(x).sum().backward()) == [
        "ort_train: layers.0 to layers.3 (forward)",
        "ort_train: layers.3 to layers.0 (backward)",
    ]
    with torch.no_grad():
        step(x)
        assert spans(lambda: step(x)) == ["ort_train: layers.0 to layers.3 (inference)"]


def test_results_are_the_same_with_a_profiler() -> None:
    net = Net(2)
    step = torch.compile(net, backend="ort_train")
    x = torch.randn(3, 4, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        out = step(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *net.parameters()])]

    plain, shown = gradients(), []
    assert spans(lambda: shown.extend(gradients()))
    assert all(torch.equal(one, other) for one, other in zip(plain, shown, strict=True))


def test_islands_that_share_a_session_are_shown_by_their_own_names() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2,)

    run = in_a_row(island(twice, "layers.0 (forward)"), island(twice, "layers.1 (forward)"))
    results = []
    assert spans(lambda: results.append(run([torch.ones(2)]))) == [
        "ort_train: layers.0 (forward)",
        "ort_train: layers.1 (forward)",
    ]
    assert results[0][0].tolist() == [4, 4]


def test_without_a_profiler_a_call_looks_once() -> None:
    calls = []
    run = in_a_row(island(lambda x: (calls.append("plain"), (x,))[1], "layers.0 (forward)"))
    lines = inspect.getsource(run).splitlines()
    assert lines[1:3] == ["    if profiler._is_profiler_enabled:", "        return in_spans(given)"]
    assert not any("profiler" in line or "spans" in line for line in lines[3:])
    run([torch.ones(2)])
    assert calls == ["plain"]


def test_a_graph_without_sessions_does_not_look() -> None:
    assert "profiler" not in inspect.getsource(in_a_row())


def test_inputs_die_as_early_with_a_profiler() -> None:
    died = []

    def second(x: torch.Tensor) -> tuple[torch.Tensor]:
        died.append(first_input() is None)
        return (x,)

    run = in_a_row(island(lambda x: (x * 2,), "a"), island(second, "b"))
    given = [torch.ones(2)]
    first_input = weakref.ref(given[0])
    assert spans(lambda: run(given)) == ["ort_train: a", "ort_train: b"]
    assert (given, died) == ([], [True])


def test_a_watch_sees_a_run_once_with_a_profiler() -> None:
    run = in_a_row(island(lambda x: (x,), "a"))
    with RunWatch() as watch:
        spans(lambda: run([torch.ones(2)]))
    assert len(watch.seen) == 1


def test_an_error_of_the_data_is_the_same_with_a_profiler() -> None:
    step = torch.compile(lambda table, index: table[index] * 2, backend="ort_train")
    table = torch.randn(4, 3, requires_grad=True)
    step(table, torch.tensor([1, 2]))
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(IndexOutOfBoundsError):
        step(table, torch.tensor([1, 9]))


def test_threads_can_run_with_a_profiler() -> None:
    run = in_a_row(island(lambda x: (x * 2,), "a"))
    results: list[Any] = []

    def all_at_once() -> None:
        threads = [threading.Thread(target=lambda: results.append(run([torch.ones(2)]))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    spans(all_at_once)
    assert [result[0].tolist() for result in results] == [[2, 2]] * 4


def test_the_functions_of_a_profiled_graph_die_with_it() -> None:
    run = in_a_row(island(lambda x: (x,), "a"))
    spans(partial(run, [torch.ones(2)]))
    died = weakref.ref(run)
    gc.disable()
    try:
        del run
        assert died() is None
    finally:
        gc.enable()


def test_a_torch_without_the_flag_shows_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_dynamo.runtime.observe import spans as spans_module
    from ort_dynamo.torch_internals.profiler import NO_PROFILER

    monkeypatch.setattr(spans_module, "PROFILER", NO_PROFILER)
    run = in_a_row(island(lambda x: (x,), "a"))
    assert spans(lambda: run([torch.ones(2)])) == []
