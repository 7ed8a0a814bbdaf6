"""The summary: the compiled graphs, where their nodes run, and the code that was not compiled, with reasons."""

from __future__ import annotations

import atexit
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ort_dynamo.notebook import ShownAsText
from ort_dynamo.program.asked_settings import BACKEND
from ort_dynamo.program.switches import read_switch
from ort_dynamo.report.by_module import Model, ModuleNodes, by_module, module_lines
from ort_dynamo.report.node_counts import BY_DESIGN, PLACE, EagerNodes, NodeCounts, section, spoken
from ort_dynamo.report.notes import FunctionNote, at_limit, break_note, given_up, grouped, handed_over, note, repeated
from ort_dynamo.report.reasons import mismatch, rule
from ort_dynamo.report.record import RECORDS, CompileRecord
from ort_dynamo.torch_internals.tracing.frames import Frame, UntracedModule, by_function, frames, untraced_modules

__all__ = [
    "EagerNodes",
    "FunctionNote",
    "ModuleNodes",
    "Summary",
    "print_at_exit",
    "summarize",
    "summary",
]


@dataclass(frozen=True, repr=False)
class Summary(ShownAsText):
    """A summary of the compiles since the process began or torch._dynamo.reset(); its str and repr are a page of text.

    It covers the last 1,024 compiles. Dynamo does not tell for which backend it gave up on a function, so skipped
    frames are those of all backends; all else is this one's.

    Attributes:
        compiles: calls of the backend, one for each of Dynamo's graphs.
        graphs: forward, backward and inference graphs.
        islands: parts of graphs that ONNX Runtime runs, each by one session.
        cache_hits: those islands that took the session of an earlier one.
        native: overload, as text -> nodes that ONNX Runtime runs.
        by_design: overload, as text -> nodes that torch runs by design: random ops and collectives.
        chosen: "overload: reason", as text -> nodes that torch runs by choice, since it is faster. They are compiled:
            the option `placement` decides, and they are no fallback.
        eager: fallbacks: nodes that torch runs in eager because ONNX Runtime cannot run them.
        not_recorded: "role: reason", as text -> graphs without a CUDA graph, though `cuda_graphs` asks for one.
        breaks: graph breaks: why graphs end inside a function, so that Python runs between two of them.
        skipped: functions that Dynamo gave up on or never traces: their own code runs in eager, functions that they
            call may be compiled.
        recompiles: compiles beyond the first of a function, each with the guard of the one before that did not hold.
        seconds: time of all compiles.
        limited: functions that reached torch's recompile limit: calls that fit no graph compiled before run in eager.
        modules: the modules of the program, with where the nodes run that each of them calls.
    """

    compiles: int
    graphs: int
    islands: int
    cache_hits: int
    native: Counter[str]
    by_design: Counter[str]
    chosen: Counter[str]
    eager: tuple[EagerNodes, ...]
    not_recorded: Counter[str]
    breaks: tuple[FunctionNote, ...]
    skipped: tuple[FunctionNote, ...]
    recompiles: tuple[FunctionNote, ...]
    seconds: float
    limited: tuple[FunctionNote, ...] = ()
    modules: tuple[ModuleNodes, ...] = ()

    @property
    def eager_nodes(self) -> int:
        """Number of fallback nodes: torch runs them because ONNX Runtime cannot."""
        return sum(nodes.count for nodes in self.eager)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        found = NodeCounts(self.native, self.by_design, self.chosen, self.eager)
        if self.graphs:
            yield (
                f"ort_train: compiles {self.compiles}, graphs {self.graphs}, islands {self.islands} "
                f"({self.cache_hits} from the cache), {self.seconds:.1f} s"
            )
            yield f"nodes: {found}"
        else:
            yield "ort_train: nothing was compiled"
            if not (self.breaks or self.skipped or self.limited):
                yield _NOTHING
        yield from module_lines(self.modules)
        yield from section(BY_DESIGN, (f"{n} x {spoken(target)}" for target, n in self.by_design.most_common()))
        yield from found.outside_sessions(advice=PLACE)
        unrecorded = (f"{n} x {reason}" for reason, n in self.not_recorded.most_common())
        yield from section("without a CUDA graph, though asked for", unrecorded)
        yield from section("recompile limit reached", grouped(self.limited))
        yield from section("graph breaks", grouped(self.breaks))
        yield from section("skipped by Dynamo, their own code runs in eager", grouped(self.skipped))
        yield from section("compiled again", repeated(self.recompiles))


_NOTHING = (
    "  A model is compiled at its first call. If it has run already, read the causes: "
    "python -m ort_dynamo help check_where_it_runs"
)


def summary() -> Summary:
    """Collect the graphs compiled with this backend, where nodes run, and the functions that Dynamo did not compile.

    It looks at all objects of the process for modules that Dynamo never traces, some tenths of a second in a large
    program, so call it now and then, not in each step.
    """
    return summarize(tuple(RECORDS), frames(RECORDS.since), untraced_modules(BACKEND))


def summarize(
    records: tuple[CompileRecord, ...], seen: tuple[Frame, ...], untraced: tuple[UntracedModule, ...]
) -> Summary:
    """Summarize some compiles.

    Args:
        records: their records.
        seen: the attempts of Dynamo's in that time.
        untraced: the modules that Dynamo never traces.
    """
    ours = {record.compile_id for record in records}
    mine = [frame for frame in seen if frame.compile_id in ours]
    models = {frame.compile_id: _model(frame, function) for function in by_function(seen) for frame in function}
    graphs = [graph for record in records for graph in record.graphs]
    islands = [island for graph in graphs for island in graph.islands]
    found = NodeCounts.of(graphs)
    return Summary(
        compiles=len(records),
        graphs=len(graphs),
        islands=len(islands),
        cache_hits=sum(island.was_cached for island in islands),
        native=found.native,
        by_design=found.by_design,
        chosen=found.chosen,
        eager=found.eager,
        not_recorded=Counter(f"{graph.role}: {graph.not_recorded}" for graph in graphs if graph.not_recorded),
        breaks=tuple(
            break_note(frame, ended)
            for function in by_function(seen)
            if _is_ours(function, seen, ours)
            for frame in function
            for ended in frame.breaks
        ),
        skipped=(
            *given_up(seen),
            *(FunctionNote(f"{one.name}.forward", "", rule(one.reason)) for one in untraced),
        ),
        recompiles=tuple(note(frame, mismatch(frame.recompiled)) for frame in mine if frame.recompiled is not None),
        seconds=sum(record.seconds for record in records),
        limited=tuple(at_limit(seen)),
        modules=by_module(
            (models.get(record.compile_id or "", _NO_MODEL), graph) for record in records for graph in record.graphs
        ),
    )


def _model(frame: Frame, function: Sequence[Frame]) -> Model:
    """Return the function that Dynamo compiled, an attempt of which this is: a module is told by the object."""
    name = frame.caller.module if frame.caller and frame.caller.module else note(frame, "").module
    number = frame.caller.number if frame.caller and name else None
    return Model(name, number if number is not None else (function[0].function, function[0].begins))


_NO_MODEL = Model("", None)


def _is_ours(function: Sequence[Frame], seen: Sequence[Frame], ours: Collection[str | None]) -> bool:
    """Check whether this backend compiled a part of a function, or of the one that it calls."""
    entered = handed_over(function, seen)
    return any(frame.compile_id in ours for frame in (*function, *([entered] if entered else [])))


def print_at_exit() -> None:
    """Print the summary to stderr where the interpreter ends, if the environment variable ORT_DYNAMO_SUMMARY is 1.

    Raises:
        InvalidVariableError: it is neither 0 nor 1.
    """
    if read_switch("ORT_DYNAMO_SUMMARY"):
        atexit.register(lambda: print(summary(), file=sys.stderr))
