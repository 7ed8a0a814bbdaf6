"""RunWatch records the compiled graphs that run inside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ort_dynamo.runtime.boxed import RunWatch, boxed


def without_sessions(label: Sequence[Any]) -> Callable[[list[Any]], Any]:
    graph = Graph()
    graph.output((graph.call_function(torch.neg, (graph.placeholder("x"),)),))
    return boxed(GraphModule({}, graph), label)


def test_graphs_that_run_are_seen_once_each_and_in_order() -> None:
    labels: list[list[str]] = [[], [], []]  # equal, and not the same
    first, second, _ = map(without_sessions, labels)
    first([torch.ones(2)])
    with RunWatch() as watch:
        for run in (second, first, second):
            run([torch.ones(2)])
        labels[1].append("it may still grow")
    first([torch.ones(2)])
    assert [id(one) for one in watch.seen] == [id(labels[1]), id(labels[0])]
    assert watch.seen[0] == ["it may still grow"]


def test_another_thread_is_not_seen() -> None:
    run = without_sessions(["a graph"])
    with RunWatch() as watch:
        thread = threading.Thread(target=run, args=([torch.ones(2)],))
        thread.start()
        thread.join()
    assert watch.seen == []


def test_a_watch_within_another_sees_its_part() -> None:
    outer, inner = without_sessions(["outer"]), without_sessions(["inner"])
    with RunWatch() as watch:
        outer([torch.ones(2)])
        with RunWatch() as within:
            inner([torch.ones(2)])
    assert (watch.seen, within.seen) == ([["outer"], ["inner"]], [["inner"]])
