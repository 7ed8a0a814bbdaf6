"""A compile tells its listeners of each stage, in order, and a listener can change how islands are opened."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from ort_dynamo import backend
from ort_dynamo.cache import open_island
from ort_dynamo.cache.open_island import CACHE
from ort_dynamo.compilation.events import BoxedRun, GraphCompilation, Listener, observed
from ort_dynamo.graph.build import BuildStage
from ort_dynamo.options.groups import Options
from ort_dynamo.report.recorder import Records


class Notes(Listener):
    """Notes each event."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def cut(self, graphs: Mapping[str, GraphModule], partition: Any) -> None:
        self.events.append(f"cut {' and '.join(graphs)}")

    def begun(self, graph: GraphCompilation) -> None:
        self.events.append(f"begun {graph.role}")

    def segmented(self, graph: GraphCompilation) -> None:
        self.events.append(f"segmented {len(graph.segmented.islands)}")

    def built(self, stage: BuildStage) -> None:
        self.events.append(stage.stage)
        assert stage.serialised()

    def opened(self, graph: GraphCompilation) -> None:
        self.events.append(f"opened {', '.join(island.source for island in graph.islands.values())}")

    def finished(self, graph: GraphCompilation, run: BoxedRun) -> BoxedRun:
        self.events.append(f"finished {graph.role}")
        return run


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Any:
    """listening(listener): each compile tells it, too."""
    CACHE.clear()

    def listen(listener: Listener) -> None:
        others = backend._listeners

        def listeners(options: Options, records: Records, *more: Listener) -> list[Listener]:
            return [*others(options, records, *more), listener]

        monkeypatch.setattr(backend, "_listeners", listeners)

    yield listen
    CACHE.clear()


BUILT = ["lowered", "rewritten", "optimized"]


def test_a_graph_with_gradients(listening: Any) -> None:
    notes = Notes()
    listening(notes)
    torch.compile(nn.Linear(3, 2), backend="ort_train")(torch.ones(4, 3)).sum().backward()
    assert notes.events == [
        "cut forward and backward",
        *["begun forward", "segmented 1", *BUILT, "opened built", "finished forward"],
        *["begun backward", "segmented 1", *BUILT, "opened built", "finished backward"],
    ]


def test_a_graph_without_gradients_and_an_equal_one(listening: Any) -> None:
    notes = Notes()
    listening(notes)
    x = torch.ones(4, 3)
    for function in (lambda x: x @ x.T + 1, lambda x: x @ x.T + 1):
        torch.compile(function, backend="ort_train")(x)
    assert notes.events == [
        *["cut inference", "begun inference", "segmented 1", *BUILT, "opened built", "finished inference"],
        *["cut inference", "begun inference", "segmented 1", "opened memory", "finished inference"],
    ]


class OtherWay(Listener):
    """Has islands opened once more, without ONNX Runtime's optimizers."""

    def failed(self, graph: GraphCompilation, error: Exception) -> bool:
        if "the first time" not in str(error):
            return False
        session = dataclasses.replace(graph.spec.session, graph_optimization="disable")
        graph.spec = dataclasses.replace(graph.spec, session=session)
        return True


@pytest.mark.parametrize("said", ["the first time", "always"])
def test_a_listener_may_have_islands_opened_another_way(
    listening: Any, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    levels: list[str] = []
    real = open_island.open_graph

    def refused(built: Any, **given: Any) -> Any:
        levels.append(built.session.graph_optimization)
        if len(levels) == 1:
            raise ValueError(f"refused {said}")
        return real(built, **given)

    monkeypatch.setattr(open_island, "open_graph", refused)
    listening(OtherWay())
    compiled = torch.compile(lambda x: x @ x.T, backend="ort_train")
    if said == "always":
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="refused always"):
            compiled(torch.ones(2, 2))
    else:
        assert compiled(torch.ones(2, 2)).sum() == 8
    assert levels == (["all"] if said == "always" else ["all", "disable"])


def test_a_listener_may_give_another_function(listening: Any) -> None:
    class Doubled(Listener):
        def finished(self, graph: GraphCompilation, run: BoxedRun) -> BoxedRun:
            def doubled(inputs: list[Any]) -> Any:
                return [2 * one for one in run(inputs)]

            doubled._boxed_call = True  # type: ignore[attr-defined]
            return doubled

    listening(Doubled())
    assert torch.compile(lambda x: x @ x, backend="ort_train")(torch.ones(2, 2)).sum() == 16


def test_observers_hear_of_each_compile_while_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    CACHE.clear()
    made: list[Notes] = []

    def make() -> Notes:
        made.append(Notes())
        return made[-1]

    with monkeypatch.context() as patched, observed(make):
        patched.setattr(backend, "stored_key", lambda *_: pytest.fail("a trace would be taken from torch's cache"))
        torch.compile(nn.Linear(3, 2), backend="ort_train")(torch.ones(4, 3))
    torch.compile(nn.Linear(3, 5), backend="ort_train")(torch.ones(4, 3))
    (notes,) = made
    assert notes.events[0] == "cut forward and backward"
    assert notes.events[-1] == "finished backward"
