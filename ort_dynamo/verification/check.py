"""Runs a step in eager mode and compiled, and compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ort_dynamo.verification.compare import differences
from ort_dynamo.verification.copies import UncheckableError
from ort_dynamo.verification.find_fault import find_fault
from ort_dynamo.verification.in_double import InDouble
from ort_dynamo.verification.record import Recorder
from ort_dynamo.verification.result import Choice, Fault, Verification
from ort_dynamo.verification.step import Step

__all__ = ["check"]


def check(
    step: Step,
    eager: Callable[..., Any],
    compiled: Callable[..., Any],
    recorder: Recorder,
    folder: Path,
    otherwise: Callable[[], Fault | None] = lambda: None,
    traced: Callable[..., Any] | None = None,
) -> Verification:
    """Run a step in eager mode and compiled, compare, and find the fault.

    Args:
        step: the step.
        eager: runs it in eager mode.
        compiled: the same function, compiled with `recorder` among the listeners.
        recorder: records what runs when it is asked to.
        folder: where a program that repeats the fault is written.
        otherwise: looks for the fault before the graphs, where all that runs is right.
        traced: the same function traced, and run in torch: other choices of equal elements must not hide a wrong trace.

    Raises:
        UncheckableError: an input cannot be copied, an output is a nested tensor, or eager mode does not repeat itself.
    """
    expected = step.observe(eager)
    found = step.observe(compiled)

    @cache
    def truth() -> Mapping[str, Any]:
        again = differences(step.observe(eager), expected, dict)
        if again:
            raise UncheckableError(f"two runs of it in eager mode differ ({again[0]})")
        mode = InDouble()
        return step.observe(eager, mode, mode.read)

    listed = differences(found, expected, truth)
    fault: Fault | None = None
    choices: tuple[Choice, ...] = ()
    if listed:
        with recorder.recording():
            step.observe(compiled)
        search = find_fault(recorder.runs, folder)
        fault = search.fault or otherwise()
        if fault is None and search.choices:
            is_traced_right = traced is None or not differences(step.observe(traced), expected, truth)
            choices = search.choices if is_traced_right else ()
        recorder.runs = []
    return Verification(len(expected), len(recorder.graphs), listed, fault, choices)
