"""Notes on functions of the program that Dynamo did not compile, or compiled in pieces or again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ort_dynamo.report.reasons import in_a_line, limit_reason
from ort_dynamo.torch_internals.tracing.frames import Frame, by_function, resumed_at
from ort_dynamo.torch_internals.tracing.graph_breaks import GraphBreak

__all__ = ["FunctionNote", "at_limit", "break_note", "given_up", "grouped", "handed_over", "note", "repeated"]


@dataclass(frozen=True)
class FunctionNote:
    """Dynamo's note on one function of the program; its str is a line.

    Attributes:
        function: the function's name; of a module compiled in place, its class and "forward".
        where: "file:line" where it begins, or of the line that made Dynamo give up, or at which a graph ends. Of a
            module of torch's own, the line that called it. Empty where one of Dynamo's rules leaves the function out.
        reason: Dynamo's reason, in a line.
        module: class of the module whose forward the function is; "" if it is none's, or if it is not known.
    """

    function: str
    where: str
    reason: str
    module: str = ""

    @property
    def name(self) -> str:
        """The function with its module's class and its file: "Net.forward (net.py:12)"."""
        resumed = resumed_at(self.function)
        name = resumed[0] if resumed else self.function
        name = f"{self.module}.{name}" if self.module else name
        after = f" after line {resumed[1]}" if resumed else ""
        return f"{name}{after}{f' ({self.where})' if self.where else ''}"

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def note(frame: Frame, reason: str) -> FunctionNote:
    """Return a note on the function of an attempt; a module's forward has the module's name."""
    caller = frame.caller
    if frame.is_wrapper and caller and caller.module:
        return FunctionNote("forward", caller.where or frame.where, reason, caller.module)
    resumed = resumed_at(frame.function)
    is_forward = caller is not None and (resumed[0] if resumed else frame.function) == "forward"
    return FunctionNote(
        frame.function, frame.where, reason, (caller.module or caller.around) if caller and is_forward else ""
    )


def break_note(frame: Frame, ended: GraphBreak) -> FunctionNote:
    """Return a note on a graph break of an attempt, with the line at which the graph ends."""
    return replace(note(frame, in_a_line(ended.reason)), where=ended.where)


def at_limit(seen: Sequence[Frame]) -> Iterator[FunctionNote]:
    """Yield the functions that reached torch's recompile limit."""
    return (note(frame, limit_reason(frame)) for frame in seen if frame.limit)


def given_up(seen: Sequence[Frame], entered: Callable[[Frame], bool] = lambda frame: True) -> Iterator[FunctionNote]:
    """Yield the functions that Dynamo gave up on, each with its reason, but none that did not run at all.

    If Dynamo cannot trace code before the first operator, torch up to 2.14 raises, and 2.15 breaks the graph. So a
    function counts as skipped if nothing of it was compiled, and it entered no other function where it broke. Otherwise
    it only calls another one, like a decorator's wrapper that logs.

    Args:
        seen: the attempts.
        entered: picks functions by their attempts; those that they hand over to are looked at as well.
    """
    following: Frame | None = None
    for function in by_function(seen):
        if following not in function and not any(map(entered, function)):
            continue
        for frame in function:
            if frame.failure is not None and not frame.limit and not frame.raised:
                yield note(frame, in_a_line(frame.failure))
        broken = _broken_before_operators(function)
        following = _entered_at(broken, seen) if broken is not None else None
        if broken is not None and following is None:
            yield break_note(broken, broken.breaks[0])


def _broken_before_operators(function: Sequence[Frame]) -> Frame | None:
    """Return the first broken frame of a function without a compiled graph."""
    if any(frame.operators or frame.failure for frame in function):
        return None
    return next((frame for frame in function if frame.breaks), None)


def handed_over(function: Sequence[Frame], seen: Sequence[Frame]) -> Frame | None:
    """Return the function that a function without a compiled graph calls; None if there is none."""
    broken = _broken_before_operators(function)
    return _entered_at(broken, seen) if broken is not None else None


def _entered_at(broken: Frame, seen: Sequence[Frame]) -> Frame | None:
    """Return the function that was entered next, unless it is the rest of one after a graph break."""
    following = next(iter(seen[seen.index(broken) + 1 :]), None)
    return None if following is None or following.is_resumed else following


_MOST = 8


def grouped(notes: Sequence[FunctionNote]) -> Iterator[str]:
    """Yield a line for each reason, with the functions that have it."""
    names: dict[str, list[str]] = {}
    for one in notes:
        names.setdefault(one.reason, []).append(one.name)
    for reason, every in names.items():
        different = list(dict.fromkeys(every))
        more = f" and {len(different) - _MOST} more" if len(different) > _MOST else ""
        times = f" ({len(every)} times)" if len(every) > len(different) else ""
        yield f"{', '.join(different[:_MOST])}{more}: {reason}{times}"


def repeated(notes: Sequence[FunctionNote]) -> Iterator[str]:
    """Yield a line for each function, with how often it has a note, and the last reason."""
    reasons: dict[str, list[str]] = {}
    for one in notes:
        reasons.setdefault(one.name, []).append(one.reason)
    for name, every in list(reasons.items())[:_MOST]:
        times = f" {len(every)} times, the last one for" if len(every) > 1 else ":"
        yield f"{name}{times} {every[-1]}"
    if len(reasons) > _MOST:
        yield f"and {len(reasons) - _MOST} more functions"
