"""Names the functions of graphs, and finds their earlier recompiles."""

from __future__ import annotations

import dataclasses
import linecache
from collections.abc import Sequence

from ort_dynamo.report.notes import FunctionNote, note
from ort_dynamo.report.reasons import mismatch
from ort_dynamo.torch_internals.frames import Frame, by_function, resumed_at

__all__ = ["breaks", "earlier_recompiles", "function_name"]


def function_name(compile_id: str | None, seen: Sequence[Frame]) -> str:
    """Return the function or module that a graph is of, with its file and line."""
    frame = next((one for one in seen if one.compile_id == compile_id), None)
    return "a function" if frame is None else note(frame, "").name


def earlier_recompiles(before: Sequence[Frame], seen: Sequence[Frame]) -> tuple[FunctionNote, ...]:
    """Find the recompiles that functions had in this process before a dry run entered them.

    Args:
        before: the attempts before the dry run.
        seen: the attempts of the dry run.
    """
    entered = {note(one, "").name for one in seen}
    again = (note(one, mismatch(one.recompiled)) for one in before if one.recompiled is not None)
    return tuple(one for one in again if one.name in entered)


def breaks(notes: Sequence[FunctionNote], seen: Sequence[Frame]) -> tuple[FunctionNote, ...]:
    """Add to notes on graph breaks the lines at which the functions broke.

    Dynamo names the code after a break by its line, so the lines are known, and which reason is whose only where there
    is one.

    Args:
        notes: the notes.
        seen: the attempts that they are of.
    """
    found: dict[str, list[str]] = {}
    for function in by_function(seen):
        at = sorted({resumed[1] for frame in function if (resumed := resumed_at(frame.function)) is not None})
        file = function[0].begins[0]
        told = [f"line {line}: {linecache.getline(file, line).strip()}" for line in at]
        for frame in function:
            found[note(frame, "").name] = told
    return tuple(dataclasses.replace(one, reason="; ".join([one.reason, *found.get(one.name, ())])) for one in notes)
