"""Says in one place which graphs were compiled, where their nodes run, and which code was not compiled and why."""

from __future__ import annotations

import atexit
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ort_dynamo.report.places import BY_DESIGN, EagerNodes, Places, section
from ort_dynamo.report.record import RECORDS, CompileRecord
from ort_dynamo.torch_internals.frames import Frame, UntracedModule, by_function, frames, untraced_modules

__all__ = ["EagerNodes", "FunctionNote", "Summary", "given_up", "in_a_line", "print_at_exit", "summary"]

_BACKEND = "ort_dynamo.backend"


@dataclass(frozen=True)
class FunctionNote:
    """Dynamo's note on one function of the program; its str is a line.

    Attributes:
        function: the function's name; of a module compiled in place, its class and "forward".
        where: "file:line" where it begins, or of the line that made Dynamo give up; empty where one of its rules leaves
            it out.
        reason: Dynamo's reason.
    """

    function: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.function}{f' ({self.where})' if self.where else ''}: {self.reason}"


@dataclass(frozen=True)
class Summary:
    """A summary of the compiles since the process began or torch._dynamo.reset(); its str is a page of text.

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

    @property
    def eager_nodes(self) -> int:
        """Number of fallback nodes: torch runs them because ONNX Runtime cannot."""
        return sum(nodes.count for nodes in self.eager)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        found = Places(self.native, self.by_design, self.chosen, self.eager)
        if self.graphs:
            yield (
                f"ort_train: compiles {self.compiles}, graphs {self.graphs}, islands {self.islands} "
                f"({self.cache_hits} from the cache), {self.seconds:.1f} s"
            )
            yield f"nodes: {found}"
        else:
            yield "ort_train: nothing was compiled"
        yield from section(BY_DESIGN, (f"{n} x {target}" for target, n in self.by_design.most_common()))
        yield from found.outside_sessions()
        unrecorded = (f"{n} x {reason}" for reason, n in self.not_recorded.most_common())
        yield from section("without a CUDA graph, though asked for", unrecorded)
        yield from section("graph breaks", map(str, self.breaks))
        yield from section("skipped by Dynamo, their own code runs in eager", map(str, self.skipped))
        yield from section("compiled again", map(str, self.recompiles))


def summary() -> Summary:
    """Collect the graphs compiled with this backend, where nodes run, and the functions that Dynamo did not compile.

    It looks at all objects of the process for modules that Dynamo never traces, some tenths of a second in a large
    program, so call it now and then, not in each step.
    """
    return _collect(tuple(RECORDS), frames(RECORDS.since), untraced_modules(_BACKEND))


def _collect(
    records: tuple[CompileRecord, ...], seen: tuple[Frame, ...], untraced: tuple[UntracedModule, ...]
) -> Summary:
    ours = {record.compile_id for record in records}
    mine = [frame for frame in seen if frame.compile_id in ours]
    graphs = [graph for record in records for graph in record.graphs]
    islands = [island for graph in graphs for island in graph.islands]
    found = Places.of(graphs)
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
            FunctionNote(frame.function, frame.where, in_a_line(reason))
            for function in by_function(seen)
            if _is_ours(function, seen, ours)
            for frame in function
            for reason in frame.breaks
        ),
        skipped=(
            *given_up(seen),
            *(FunctionNote(f"{one.name}.forward", "", f"{one.reason}; {_ADVICE}") for one in untraced),
        ),
        recompiles=tuple(
            FunctionNote(frame.function, frame.where, in_a_line(frame.recompiled))
            for frame in mine
            if frame.recompiled is not None
        ),
        seconds=sum(record.seconds for record in records),
    )


def _is_ours(function: Sequence[Frame], seen: Sequence[Frame], ours: Collection[str | None]) -> bool:
    """Check whether this backend compiled some part of a function, or of the one that it hands over to."""
    broken = _broken_before_operators(function)
    entered = _entered_at(broken, seen) if broken is not None else None
    return any(frame.compile_id in ours for frame in (*function, *([entered] if entered else [])))


_ADVICE = "torch.compile(module) traces it where module.compile() does not"


def given_up(seen: Sequence[Frame]) -> Iterator[FunctionNote]:
    """Yield the functions that Dynamo gave up on, each with its reason.

    torch up to 2.14 raises where it meets code that it cannot trace before any operator, and 2.15 breaks the graph
    there. So one that broke is told from one that only hands over to another (a decorator's wrapper that logs, say) by
    nothing of it having been compiled, and by no other function having been entered where it broke.
    """
    for function in by_function(seen):
        for frame in function:
            if frame.failure is not None:
                yield FunctionNote(frame.function, frame.where, in_a_line(frame.failure))
        broken = _broken_before_operators(function)
        if broken is not None and _entered_at(broken, seen) is None:
            yield FunctionNote(broken.function, broken.where, in_a_line(broken.breaks[0]))


def _broken_before_operators(function: Sequence[Frame]) -> Frame | None:
    """Return the first frame that broke, of a function of which nothing was compiled."""
    if any(frame.operators or frame.failure for frame in function):
        return None
    return next((frame for frame in function if frame.breaks), None)


def _entered_at(broken: Frame, seen: Sequence[Frame]) -> Frame | None:
    """Return the function that was entered next, unless it is the rest of one after a graph break."""
    following = next(iter(seen[seen.index(broken) + 1 :]), None)
    return None if following is None or following.is_resumed else following


def in_a_line(text: str) -> str:
    """Return the first lines of Dynamo's message and explanation, and the setting that a hint names."""
    title, _, rest = text.strip().partition("\n")
    lines = rest.splitlines()
    said = [title, *(line.partition("Explanation:")[2] for line in lines if "Explanation:" in line)]
    settings = [line.partition("Hint:")[2].strip() for line in lines if _SETTING in line.partition("Hint:")[2]]
    found = ": ".join(part.strip().rstrip(":") for part in said[:2])
    return f"{found.removesuffix('.')}. {settings[0]}" if settings else found


_SETTING = "torch._dynamo.config."


def print_at_exit() -> None:
    """Print the summary to stderr where the interpreter ends, if the environment variable ORT_DYNAMO_SUMMARY is set."""
    if os.environ.get("ORT_DYNAMO_SUMMARY", "0") not in ("", "0"):
        atexit.register(lambda: print(summary(), file=sys.stderr))
