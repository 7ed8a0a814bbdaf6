"""Names the functions of graphs, and finds their earlier recompiles."""

from __future__ import annotations

from collections.abc import Sequence

from ort_dynamo.report.notes import FunctionNote, note
from ort_dynamo.report.reasons import mismatch
from ort_dynamo.torch_internals.tracing.frames import Frame

__all__ = ["earlier_recompiles", "function_name"]


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
