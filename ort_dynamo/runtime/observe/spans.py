"""Shows each run of a session in torch's profiler, and costs one look at a flag while none records."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from torch.profiler import record_function

from ort_dynamo.runtime.observe.node_profile import Span, node_profile
from ort_dynamo.torch_internals.profiler import NO_PROFILER, PROFILER

__all__ = ["Spans", "spanned_while_recorded"]

_NAME = "ort_train: "


class Spans:
    """Run an outer graph with a profiler span for each session.

    The normal function has no code for spans. While a profiler records, its first lines call a second version: the same
    code, in which each island's name is bound to a function that opens a span around the run.

    Args:
        spans: the name of an island's `run` in the code -> its span.
    """

    def __init__(self, spans: Mapping[str, Span]) -> None:
        self._spans = spans
        self._plain: Callable[[], Any] = lambda: None
        self._twin: Callable[[list[Any]], Any] | None = None

    def lines(self) -> tuple[list[str], dict[str, Any]]:
        """Return the first lines of the function, and the values that they use by name."""
        if not self._spans:
            return [], {}
        lines = ["    if profiler._is_profiler_enabled:", "        return in_spans(given)"]
        return lines, {"profiler": PROFILER, "in_spans": self}

    def of(self, run: Callable[[list[Any]], Any]) -> None:
        """Take the function of those lines, which holds this object and must not be held by it."""
        self._plain = weakref.ref(run)

    def __call__(self, given: list[Any]) -> Any:
        """Run the graph on `given`, which it empties."""
        if self._twin is None:
            plain = self._plain()
            values = {**plain.__globals__, "profiler": NO_PROFILER, "in_spans": None}
            values |= {name: _spanned(values[name], span) for name, span in self._spans.items()}
            self._twin = FunctionType(plain.__code__, values, plain.__name__)
        return self._twin(given)


def _spanned(run: Callable[..., Any], span: Span) -> Callable[..., Any]:
    name = _NAME + span.name

    def run_in_span(*values: Any) -> Any:
        with record_function(name):
            profile = node_profile()
            return run(*values) if profile is None else profile.run(span, run, *values)

    return run_in_span


def spanned_while_recorded(run: Callable[..., Any], span: Span) -> Callable[..., Any]:
    """Return a function that runs a session, and opens a span around the run while a profiler records."""
    run_in_span = _spanned(run, span)

    def run_in_span_if_recorded(*values: Any) -> Any:
        return run_in_span(*values) if PROFILER._is_profiler_enabled else run(*values)

    return run_in_span_if_recorded
