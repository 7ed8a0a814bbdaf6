"""Show the progress of a long compile: on a terminal, in a notebook, or if the program asks for it.

A daemon thread prints it. The compile itself only records its stage and counts nodes, so a stage without a count, such
as tracing, is shown as well.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO, TypeVar

from ort_dynamo.program.switches import read_switch

__all__ = ["RUNNING", "SWITCH", "clocked", "counted", "is_shown", "showing", "stage"]

SWITCH = "ORT_DYNAMO_PROGRESS"
"""The environment variable that switches it off by 0, and by 1 on where stderr is neither a terminal nor a notebook."""

_AFTER = 2.0
"""Seconds of a compile that pass before anything is shown."""

_EVERY = 0.2
"""Seconds between two drawings of the line on a terminal or in a notebook."""

_EVERY_IN_A_FILE = 10.0
"""Seconds between two lines in a file or a pipe."""

_JOIN = 1.0
"""Seconds that a finished compile waits for the thread. It is late only if stderr does not take its text."""

_T = TypeVar("_T")


RUNNING = "running the program"
"""The stage of a clock between two compiles."""


class _StageClock:
    """Adds up the seconds of each stage, in order; those of a compile are shown as well, if `is_shown`.

    Attributes:
        seconds: stage -> seconds.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._shown: _Progress | None = None
        self._now, self._since = RUNNING, time.perf_counter()
        self._done = 0

    @property
    def done(self) -> int:
        """Number of nodes of the stage that are done."""
        return self._done

    @done.setter
    def done(self, count: int) -> None:
        self._done = count
        if self._shown is not None:
            self._shown.done = count

    def stage(self, name: str, total: int | None = None) -> None:
        """End the stage, and begin another one."""
        self.stop()
        if self._shown is not None:
            self._shown.stage(name, total)
        self._now, self.done = name, 0

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Take the stages that come while this is open for those of one compile."""
        self._shown = _Progress(sys.stderr) if is_shown() else None
        self.stage("preparing")
        try:
            yield
        finally:
            if self._shown is not None:
                self._shown.close()
                self._shown = None
            self.stage(RUNNING)

    def stop(self) -> None:
        """End the stage."""
        now = time.perf_counter()
        self.seconds[self._now] = self.seconds.get(self._now, 0.0) + now - self._since
        self._since = now


class _Progress:
    """One compile: its stage, and how many of the stage's nodes are done."""

    def __init__(self, stream: TextIO) -> None:
        self.begin = time.monotonic()
        self.now: tuple[str, int | None] = ("preparing", None)  # one object, which a thread reads as a whole
        self.done = 0
        self._stream = stream
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="ort_dynamo progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a daemon thread must not write while the interpreter shuts down

    def stage(self, name: str, total: int | None = None) -> None:
        self.now, self.done = (name, total), 0

    def close(self) -> None:
        atexit.unregister(self.close)
        self._over.set()
        self._thread.join(_JOIN)  # in a forked child it is no longer alive, and this returns at once

    def _draw(self) -> None:
        if self._over.wait(_AFTER):
            return
        # A stream that is closed, or whose reader is gone, ends the display and not the compile.
        with contextlib.suppress(OSError, ValueError):
            self._bar() if self._stream.isatty() or _is_notebook() else self._lines()

    def _bar(self) -> None:
        from tqdm import tqdm

        class Bar(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # starts no thread of tqdm's, which would outlive the compile

        # A notebook has no line below a bar of the program's own.
        position = 0 if _is_notebook() else None
        bar: Any = Bar(leave=False, file=self._stream, position=position, bar_format=self._text(" {bar}"))
        try:
            while not self._over.wait(_EVERY):
                bar.bar_format, bar.n, bar.total = self._text(" {bar}"), self.done, self.now[1]
                bar.refresh()
        finally:
            bar.close()

    def _lines(self) -> None:
        while True:
            self._stream.write(f"{self._text()}\n")
            self._stream.flush()
            if self._over.wait(_EVERY_IN_A_FILE):
                return

    def _text(self, picture: str = "") -> str:
        (name, total), done = self.now, self.done
        counted = f":{picture} {done} of {total} nodes" if total else ""
        return f"ort_train: {name}{counted}, {time.monotonic() - self.begin:.0f} s"


_current: ContextVar[_Progress | _StageClock | None] = ContextVar("ort_dynamo progress", default=None)
_of_all_threads: list[_StageClock] = []


def _running() -> _Progress | _StageClock | None:
    return _current.get() or (_of_all_threads[-1] if _of_all_threads else None)


@contextmanager
def showing() -> Iterator[None]:
    """Show the stages that come while this is open, if `is_shown`; a clock adds up their seconds."""
    outer = _running()
    if isinstance(outer, _StageClock):
        with outer.compiling():
            yield
        return
    if not is_shown() or outer is not None:
        yield
        return
    progress = _Progress(sys.stderr)
    token = _current.set(progress)
    try:
        yield
    finally:
        _current.reset(token)
        progress.close()


@contextmanager
def clocked(*, threads: bool = False) -> Iterator[dict[str, float]]:
    """Add up the seconds of the stages that come while this is open, by stage.

    Args:
        threads: whether the stages of other threads count; torch compiles in one thread at a time.
    """
    clock = _StageClock()
    token = _current.set(clock)
    if threads:
        _of_all_threads.append(clock)
    try:
        yield clock.seconds
    finally:
        clock.stop()
        _current.reset(token)
        if threads:
            _of_all_threads.remove(clock)


def stage(name: str) -> None:
    """Begin a stage that counts nothing."""
    if (progress := _running()) is not None:
        progress.stage(name)


def counted(nodes: Iterable[_T], name: str) -> Iterable[_T]:
    """Begin a stage that goes through nodes, and count them."""
    progress = _running()
    return nodes if progress is None else _counted(progress, list(nodes), name)


def _counted(progress: _Progress | _StageClock, nodes: list[_T], name: str) -> Iterator[_T]:
    progress.stage(name, len(nodes))
    for node in nodes:
        yield node
        progress.done += 1


def is_shown() -> bool:
    """Check whether stderr is a terminal or a notebook's, or the program has switched the progress on.

    Programs that have switched it off show nothing, nor do processes after the first one on a machine (torchrun).

    Raises:
        InvalidVariableError: ORT_DYNAMO_PROGRESS is neither 0 nor 1.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" or sys.stderr is None:
        return False
    asked = read_switch(SWITCH)
    return sys.stderr.isatty() or _is_notebook() if asked is None else asked


def _is_notebook() -> bool:
    """Check whether the program runs in a kernel of IPython's (Jupyter, VS Code, Colab), without importing IPython."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return any(one.__name__ == "ZMQInteractiveShell" for one in type(shell).__mro__)
