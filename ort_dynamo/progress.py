"""Shows on a terminal how far a compile is, once it takes long."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["SWITCH", "counted", "is_shown", "showing", "stage"]

SWITCH = "ORT_DYNAMO_PROGRESS"
"""The environment variable that turns it off, by 0."""

_AFTER = 2.0
"""Seconds of a compile that pass before anything is shown."""

_T = TypeVar("_T")


class _Progress:
    """One compile: which stage it is in, and how many of its nodes are done."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._bar: Any = None
        self._name = ""
        self._total: int | None = None
        self._done = 0

    def stage(self, name: str, total: int | None = None) -> None:
        self._name, self._total, self._done = name, total, 0
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_description_str(name, refresh=False)
            self._bar.reset()
        self._show()

    def advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        else:
            self._show()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _show(self) -> None:
        if self._bar is None and time.monotonic() - self._begin >= _AFTER:
            from tqdm import tqdm

            self._bar = tqdm(
                desc=self._name, total=self._total, initial=self._done, unit=" nodes", leave=False, file=sys.stderr
            )


_current: ContextVar[_Progress | None] = ContextVar("ort_dynamo progress", default=None)


@contextmanager
def showing() -> Iterator[None]:
    """Show the stages that come while this is open, where the program has a terminal and has not switched it off.

    Of several processes on a machine (torchrun), the first one shows them.
    """
    if not is_shown():
        yield
        return
    progress = _Progress()
    token = _current.set(progress)
    try:
        yield
    finally:
        _current.reset(token)
        progress.close()


def stage(name: str) -> None:
    """Begin a stage that counts nothing."""
    if (progress := _current.get()) is not None:
        progress.stage(name)


def counted(nodes: Iterable[_T], name: str) -> Iterable[_T]:
    """Begin a stage that goes through nodes, and count them."""
    progress = _current.get()
    return nodes if progress is None else _counted(progress, list(nodes), name)


def _counted(progress: _Progress, nodes: list[_T], name: str) -> Iterator[_T]:
    progress.stage(name, len(nodes))
    for node in nodes:
        yield node
        progress.advance()


def is_shown() -> bool:
    """Check that the program has a terminal, which is the one of the first process, and has not switched it off."""
    return (
        os.environ.get(SWITCH, "1") != "0"
        and sys.stderr is not None
        and sys.stderr.isatty()
        and os.environ.get("LOCAL_RANK", "0") == "0"
    )
