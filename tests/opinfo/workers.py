"""Runs cases in processes of their own. One that dies or hangs costs its current case, and is replaced."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["ENDS_ITS_PROCESS", "Case", "Verdict", "Worker"]

Verdict = dict[str, Any]
"""The outcome of a case; "kind" names it, "detail" says more."""

Case = Callable[[], Verdict]

ENDS_ITS_PROCESS = "ends its process"
"""An entry that a verdict has where nothing after the case can run in the same process."""

_STARTS_WITHIN = 300.0
"""Seconds in which a process has to finish its imports."""


def _serve(connection: Any, prepare: Callable[[], None], cases_of: Callable[[Any], Iterable[Case]]) -> None:
    """Receive (job, first case); send (index, None) before and (index, verdict) after each case, and then None."""
    prepare()
    connection.send(None)
    while (message := connection.recv()) is not None:
        job, first = message
        for index, case in enumerate(cases_of(job)):
            if index >= first:
                connection.send((index, None))
                connection.send((index, case()))
        connection.send(None)


class Worker:
    """Runs jobs one after another in a process of its own, which it replaces when it dies.

    Args:
        prepare: called once in each process.
        cases_of: the cases of a job, in their order. Both are functions of a module.
        seconds: of a case; one that takes longer hangs.
        end: when no case may run any more, by time.monotonic.
    """

    def __init__(
        self,
        prepare: Callable[[], None],
        cases_of: Callable[[Any], Iterable[Case]],
        seconds: float = 300.0,
        end: float = math.inf,
    ) -> None:
        self._prepare, self._cases_of = prepare, cases_of
        self._seconds, self._end = seconds, end
        self._process: Any = None

    def run(self, job: Any) -> list[Verdict]:
        """The verdicts of a job's cases; kind "crashed" where the process ended or hung, "not run" after the end."""
        verdicts: list[Verdict] = []
        first = 0
        while True:
            running: int | None = None
            try:
                if self._process is None:
                    self._start()
                self._connection.send((job, first))
                while (message := self._receive(self._seconds)) is not None:
                    running, verdict = message
                    if verdict is not None:
                        first, running = running + 1, None
                        verdicts.append(verdict)
                        if verdict.pop(ENDS_ITS_PROCESS, False):
                            self._kill()
                            break
                else:
                    return verdicts
            except (EOFError, ConnectionError, TimeoutError) as error:
                status = self._kill()
                if time.monotonic() >= self._end:
                    return [*verdicts, {"kind": "not run", "detail": "the time was over"}]
                why = "it hangs" if isinstance(error, TimeoutError) else f"the process ended with status {status}"
                if running is None:  # before the first case, or between two: it would end there again
                    return [*verdicts, {"kind": "crashed", "detail": f"outside its cases: {why}"}]
                verdicts.append({"kind": "crashed", "detail": f"case {running}: {why}"})
                first = running + 1

    def stop(self) -> None:
        """End the process, if there is one, when it has done its work."""
        if self._process is not None:
            self._connection.send(None)
            self._process.join(10)
            self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, self._prepare, self._cases_of)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._receive(_STARTS_WITHIN)

    def _receive(self, seconds: float) -> Any:
        if not self._connection.poll(max(0.0, min(seconds, self._end - time.monotonic()))):
            raise TimeoutError
        return self._connection.recv()

    def _kill(self) -> int | None:
        process, self._process = self._process, None
        process.join(0.5)  # one that is ending has its own status
        process.kill()
        process.join()
        status: int | None = process.exitcode
        return status
