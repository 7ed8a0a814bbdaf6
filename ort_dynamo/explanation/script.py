"""Observes the compiles of a program, and explains them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ort_dynamo.cache.disk import stored_place
from ort_dynamo.compilation.events import observed
from ort_dynamo.explanation.collect import Collect
from ort_dynamo.explanation.explanation import Explanation
from ort_dynamo.explanation.notes import function_name
from ort_dynamo.explanation.step_calls import StepCalls
from ort_dynamo.options.groups import CacheOptions
from ort_dynamo.program.asked_settings import BACKEND
from ort_dynamo.program.progress import clocked
from ort_dynamo.report.summary import summarize
from ort_dynamo.torch_internals.tracing.frames import frames, untraced_modules

__all__ = ["Observed", "observing"]


class Observed:
    """The compiles of a program.

    Args:
        name: the program's file.
        seconds: stage -> seconds of all compiles so far.
    """

    def __init__(self, name: str, seconds: Mapping[str, float]) -> None:
        self._name = name
        self._seconds = seconds
        self._before: Mapping[str, float] = {}
        self._collected: list[Collect] = []
        self._calls = StepCalls()
        self._begin = time.time()

    def make(self) -> Collect:
        """Give the listener of a compile that begins."""
        self._settle()
        self._before = dict(self._seconds)
        self._collected.append(Collect(self._calls))
        return self._collected[-1]

    def _settle(self) -> None:
        """Give the last compile the stages that came since it began."""
        if self._collected:
            self._collected[-1].stages = {
                name: seconds - self._before.get(name, 0.0) for name, seconds in self._seconds.items()
            }

    def explanation(self) -> Explanation:
        """Explain the compiles so far; of those that failed, what they came to."""
        self._settle()
        seen = frames(self._begin)
        collected = [one for one in self._collected if one.roles]
        summary = summarize(tuple(one.compiled() for one in collected), seen, untraced_modules(BACKEND))
        return Explanation(
            name=self._name,
            graphs=tuple(one.graph(function_name(one.compile_id, seen)) for one in collected),
            summary=summary,
            runtime=collected[-1].runtime if collected else "",
            calls=self._calls.largest(collected),
            cache=str(place.path) if (place := stored_place(CacheOptions())) is not None else "",
        )


@contextmanager
def observing(name: str) -> Iterator[Observed]:
    """Observe all compiles of the backend while this is open.

    Args:
        name: the program's file.
    """
    with clocked(threads=True) as seconds:
        found = Observed(name, seconds)
        with observed(found.make):
            yield found
