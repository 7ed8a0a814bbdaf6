"""The outer graph as a callable in the boxed convention: one list in, which it empties, so inputs die early."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch.fx import GraphModule

from ort_dynamo.graph.node_origins import NodeOrigins
from ort_dynamo.options.groups import DumpOptions
from ort_dynamo.runtime.compiled_graph import CompiledGraph
from ort_dynamo.runtime.data_errors import data_error
from ort_dynamo.runtime.generated_code import generate_function
from ort_dynamo.runtime.in_torch import InTorch
from ort_dynamo.runtime.observe.checked_run import checked_once
from ort_dynamo.runtime.observe.node_profile import Span
from ort_dynamo.runtime.observe.observed_run import ObservedGraph, Show, forget_sessions
from ort_dynamo.runtime.observe.spans import Spans, spanned_while_recorded
from ort_dynamo.runtime.outer_code import IslandCall, outer_code, run_name
from ort_dynamo.runtime.session_code import Stopped

__all__ = ["Island", "RunWatch", "boxed"]


class Island(torch.nn.Module):
    """The node of a compiled island in the outer graph; `boxed` replaces it by a direct call.

    Args:
        compiled: the compiled island.
        places: name of an ONNX node that data can stop -> where it comes from in the user's code.
        covers: the modules and the graph that it belongs to, for profiles.
    """

    def __init__(self, compiled: CompiledGraph, places: Mapping[str, str], covers: str = "") -> None:
        super().__init__()
        self.compiled = compiled
        self._places = places
        self._covers = covers

    def as_call(self) -> IslandCall:
        """Give the call that the outer graph's code makes for the island.

        It raises an ExecutionError where ONNX Runtime stopped: IndexOutOfBoundsError if at an index in the data,
        IntegerDivisionByZeroError if at a divisor.
        """
        places = self._places
        return IslandCall(
            self.compiled.run,
            len(self.compiled.built.outputs),
            Stopped,
            lambda stopped: data_error(str(stopped), places),
            self._covers,
        )


class RunWatch:
    """Records the compiled graphs that run in this thread inside of `with`; without one, a call costs one check.

    A forked child records nothing.

    Attributes:
        seen: the labels of the graphs that ran, as passed to `boxed`: each once, in the order of the first run.
    """

    def __init__(self) -> None:
        self.seen: list[Sequence[Any]] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        _watches.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self not in _watches:
            return  # in a forked child
        _watches.remove(self)
        if not _watches:
            forget_sessions()

    def is_in_its_thread(self) -> bool:
        """Check whether the calling thread is the one that made this object."""
        return threading.get_ident() == self._thread

    def note(self, label: Sequence[Any]) -> None:
        """Note that the graph of this label runs in the calling thread."""
        if self.is_in_its_thread() and not any(one is label for one in self.seen):
            self.seen.append(label)

    def observe(self, label: Sequence[Any], graph: ObservedGraph) -> Show | None:
        """Give the function that is shown each value of this run of a graph, or None; called in the running thread."""
        return None


_watches: list[RunWatch] = []

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_watches.clear)  # another thread may hold a watch's lock


def _note_run(label: Sequence[Any], graph: ObservedGraph | None, given: list[Any]) -> Any:
    """Tell each watch of a run; if one observes it, run it and return its results."""
    watches = tuple(_watches)
    for watch in watches:
        watch.note(label)
    if graph is None or not graph.can_show(given):
        return None
    observers = [show for watch in watches if (show := watch.observe(label, graph)) is not None]
    return graph.run(given, observers) if observers else None


_NOTE = ("        results = note_run(given)", "        if results is not None:", "            return results")


def boxed(
    gm: GraphModule,
    label: Sequence[Any] = (),
    options: DumpOptions | None = None,
    in_torch: InTorch | None = None,
    origins: NodeOrigins | None = None,
) -> Callable[[list[Any]], Any]:
    """`gm` as a boxed function, whose code is written by `outer_code`.

    Args:
        gm: the outer graph.
        label: shown to each RunWatch when the function runs, with or without a session. It may still grow: the records
            of all graphs of one compile are such a list.
        options: whether `checked_once` runs the first call.
        in_torch: runs a call whose tensors ONNX Runtime cannot read. Without it there is none.
        origins: where the nodes come from, for a RunWatch that observes values. Without it, or `in_torch`, none does.
    """
    found = {name: child for name, child in gm.named_children() if isinstance(child, Island)}
    islands = {name: child.as_call() for name, child in found.items()}
    ran = {name: Span(call.covers or name, found[name].compiled, name, origins) for name, call in islands.items()}
    observed = None
    if in_torch is not None and origins is not None:
        both = {
            name: (found[name].compiled, replace(call, run=spanned_while_recorded(call.run, ran[name])))
            for name, call in islands.items()
        }
        observed = ObservedGraph(gm, in_torch.whole, origins, both)
    lines, values = outer_code(gm, islands)
    asked, asking = in_torch.lines(gm) if in_torch is not None else ((), {})
    spans = Spans({run_name(name): span for name, span in ran.items()})
    looked, looking = spans.lines()
    lines[1:1] = [*looked, "    if watches:", *_NOTE, *asked]
    note_run = partial(_note_run, label, observed)
    values |= {**asking, **looking, "watches": _watches, "note_run": note_run}
    run = generate_function("outer", lines, values)
    spans.of(run)
    run._boxed_call = True  # type: ignore[attr-defined]
    if options is None or not options.verify_values:
        return run
    checked = checked_once(gm, islands, run, note_run)
    return checked if in_torch is None else in_torch.around(checked, gm)
