"""Collects statistics of the values that compiled graphs compute while a block runs."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.graph.node_origins import NodeOrigin
from ort_dynamo.runtime.boxed import RunWatch
from ort_dynamo.runtime.observe.observed_run import ObservedGraph, Show
from ort_dynamo.statistics.run import RunStatistics
from ort_dynamo.statistics.summarize import Numbers, count_abnormal, summarize
from ort_dynamo.statistics.values import INPUT, ValueStatistics
from ort_dynamo.torch_internals.autograd import in_backward
from ort_dynamo.torch_internals.kernels.view_operators import VIEWS

__all__ = ["CollectedStatistics", "collect_statistics"]


@contextmanager
def collect_statistics(*, every: int = 1, modules: str | Sequence[str] | None = None) -> Iterator[CollectedStatistics]:
    """Collect statistics of the values of each compiled graph that runs in the block, forward and backward.

    The models may be compiled before the block. Results, gradients and random numbers are those of a run without it. A
    value inside an island is computed by a second session, which has the nodes of the first one and gives their values
    as results. It needs memory for all values of one island at once. A value that is inside a fused ONNX operator is
    not seen. Nor is any of a call that torch transforms (vmap, forward-mode gradients) or that CUDA graphs record, nor
    memory that the program has not filled yet (`torch.empty`), nor the result of a collective before its wait. A value
    whose statistics fail, since memory runs out say, is left out with a warning in the log.

    Values of graphs that run in other threads are collected, too. Only the thread that opens the block begins steps.

    Args:
        every: collect of each `every`-th step alone: of steps 0, `every`, 2 · `every` and so on. A step begins with the
            block. A next one begins when a forward runs after a backward, but not with one that checkpointing runs
            again inside a backward. A graph without gradients begins a step when it runs again; if your layers share
            one such graph, or a step has several backwards, call `next_step` yourself.
        modules: paths of modules, as in `named_modules()`, with the wildcards of fnmatch. Values are collected of these
            and of the modules inside them. The path "" is that of the model's own operators, and of those outside of
            modules. None collects of all, and of the inputs of the graphs. Of other values NaN and infinite elements
            are counted, so that `first_nan` does not blame the first operator that gets them.

    Returns:
        A context manager that gives the statistics, which grow as graphs run.

    Raises:
        InvalidArgumentError: `every` is not a number above 0, or `modules` has something other than text.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise InvalidArgumentError(function="collect_statistics", name="every", value=every, expected="an int above 0")
    patterns = _patterns(modules)
    collected = CollectedStatistics()
    with _Collector(collected, every, patterns):
        yield collected


def _patterns(modules: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if modules is None:
        return None
    given = (modules,) if isinstance(modules, str) else tuple(modules) if isinstance(modules, Iterable) else (modules,)
    if not all(isinstance(one, str) for one in given):
        raise InvalidArgumentError(
            function="collect_statistics", name="modules", value=modules, expected="a path, or a sequence of paths"
        )
    return given


class CollectedStatistics(RunStatistics):
    """The statistics of a block of `collect_statistics`, which grow as graphs run.

    Attributes:
        step: the number of the present step; 0 at first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.step: int = 0
        self._counts = True

    def next_step(self) -> None:
        """Begin the next step. From the first call on, no step begins by itself."""
        self.step += 1
        self._counts = False


_NOT_ASKED = "Graphs of ort_train ran, and no value of theirs was collected. Are `modules` paths as in named_modules()?"


class _Collector(RunWatch):
    def __init__(self, collected: CollectedStatistics, every: int, patterns: Sequence[str] | None) -> None:
        super().__init__()
        self.collected, self.patterns = collected, patterns
        self.lock = threading.Lock()
        self._every = every
        self._labels: list[Sequence[Any]] = []
        self._ran: set[tuple[int, str]] = set()
        self._elsewhere: set[int] = set()

    def observe(self, label: Sequence[Any], graph: ObservedGraph) -> Show | None:
        """Give the function that summarizes the values of this run, if the step is one of those to look at."""
        role = graph.origins.role
        with self.lock:
            number = next((index for index, one in enumerate(self._labels) if one is label), len(self._labels))
            if number == len(self._labels):
                self._labels.append(label)
            self._count(number, role)
            self.collected._why_empty = _NOT_ASKED
            step = self.collected.step
        return None if step % self._every else _GraphRun(self, graph, number, step)

    def _count(self, number: int, role: str) -> None:
        """Begin the next step if this run of a graph is its first."""
        is_recomputed = role != "backward" and in_backward()
        if not self.is_in_its_thread():
            # autograd runs backwards in threads of its own
            if role != "backward" and not is_recomputed:
                self._elsewhere.add(number)
            if role != "backward" or (number in self._elsewhere and (number, "forward") not in self._ran):
                return
        again = role != "forward" and (number, role) in self._ran  # a forward may run once for each layer
        is_new = role != "backward" and not is_recomputed and (again or any(r == "backward" for _, r in self._ran))
        if is_new and self.collected._counts:
            self.collected.step += 1
            self._ran.clear()
        self._ran.add((number, role))


class _GraphRun:
    """One run of a graph: called with the index and the value of each node."""

    def __init__(self, collector: _Collector, graph: ObservedGraph, number: int, step: int) -> None:
        self._collector, self._graph, self._number, self._step = collector, graph, number, step
        self._seen: dict[int, Numbers] = {}

    def __call__(self, index: int, value: torch.Tensor) -> None:
        if value.layout is not torch.strided or value.is_quantized:
            return
        whole, origins = self._graph.whole, self._graph.origins
        node, item = index, ""
        if whole.nodes[index].target is operator.getitem:
            (node,), (place,) = whole.arguments(index)
            item = f"[{place}]"
        origin = origins.nodes[node]
        is_wanted = self._is_wanted(origin)
        numbers = self._seen[index] = summarize(value) if is_wanted else count_abnormal(value)
        if not is_wanted:
            return
        above = self._above(node) if numbers.nan or numbers.inf else _ABOVE
        begins = _begins(origin, numbers, above)
        row = ValueStatistics(
            step=self._step,
            graph=self._number,
            role=origins.role,
            index=index,
            node=f"{origin.name}{item}",
            overload=origin.overload or INPUT,
            module=origin.module,
            line=origin.line,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(value.shape),
            **numbers._asdict(),
            begins=begins,
            fused=above.unseen if begins else (),
        )
        with self._collector.lock:
            self._collector.collected.statistics.append(row)

    def _is_wanted(self, origin: NodeOrigin) -> bool:
        patterns = self._collector.patterns
        if patterns is None:
            return True
        path = origin.module.rpartition("(")[0].rstrip()
        return bool(origin.overload) and any(
            fnmatchcase(path, one) or fnmatchcase(path, f"{one}.*") for one in patterns
        )

    def _above(self, node: int) -> _Above:
        """Look at the arguments of a node, and above those that were not seen."""
        nan = inf = False
        unseen: set[int] = set()
        looked, waiting = {node}, [node]
        while waiting:
            inputs, constants = self._graph.whole.arguments(waiting.pop())
            floats = [one for one in constants if isinstance(one, float)]
            nan, inf = nan or any(map(math.isnan, floats)), inf or any(map(math.isinf, floats))
            for one in inputs:
                if (seen := self._seen.get(one)) is not None:
                    nan, inf = nan or bool(seen.nan), inf or bool(seen.inf)
                elif one not in looked:
                    looked.add(one)
                    waiting.append(one)
                    unseen.add(one)
        origins = self._graph.origins.nodes
        names = (origins[one].overload for one in sorted(unseen) if self._is_wanted(origins[one]))
        return _Above(nan, inf, tuple(name for name in dict.fromkeys(names) if name and name not in _NEUTRAL))


class _Above(NamedTuple):
    """The state of the values that a value was computed from.

    Attributes:
        nan: whether one has NaN, or is a constant NaN.
        inf: the same of infinite elements.
        unseen: the operators between these values and the value, whose values were not seen.
    """

    nan: bool
    inf: bool
    unseen: tuple[str, ...]


_ABOVE = _Above(False, False, ())

_NEUTRAL = {str(one) for one in VIEWS}
"""Operators in which nothing begins."""


def _begins(origin: NodeOrigin, numbers: Numbers, above: _Above) -> Literal["", "nan", "inf"]:
    """Say whether NaN, or else infinite elements, begin at a value."""
    is_tangent = origin.name.startswith("tangents")
    if not origin.overload:
        return "nan" if numbers.nan else "inf" if numbers.inf and is_tangent else ""
    if numbers.nan and not above.nan:
        return "nan"
    return "inf" if numbers.inf and not (above.nan or above.inf) else ""
