"""Python's garbage collector during a compile, which makes many objects and drops few cycles of them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["fewer_collections"]

_THRESHOLDS = (50_000, 5, 100)
"""Thresholds of the three generations during a compile: none of a step of a 12-layer GPT-2 gets to the oldest.

Python's own (700, 10, 10) look through all objects of the program, some million after `import transformers`, a dozen
times in such a compile. The collector is not off, since a compile does leave cycles: 150,000 objects in this one.
"""


class _Compiles:
    """The compiles of this process that are open, and the program's own thresholds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[object] = set()
        self._own: tuple[int, int, int] | None = None

    def begin(self, compile_: object) -> None:
        """Raise the thresholds, unless the program has higher ones, or has none: a first threshold of 0 is "off"."""
        with self._lock:
            self._open.add(compile_)
            own = gc.get_threshold()
            if self._own is None and 0 < own[0] < _THRESHOLDS[0]:
                self._own = own
                gc.set_threshold(*_THRESHOLDS)

    def end(self, compile_: object) -> None:
        """Put the program's thresholds back after the last compile, unless it has set others meanwhile."""
        with self._lock:
            self._open.discard(compile_)
            if not self._open:
                self._restore()

    def forget(self) -> None:
        """Put the thresholds back in a forked child, where no other thread goes on with a compile."""
        self._lock = threading.Lock()
        self._open.clear()
        self._restore()

    def _restore(self) -> None:
        own, self._own = self._own, None
        if own is not None and gc.get_threshold() == _THRESHOLDS:
            gc.set_threshold(*own)


_compiles = _Compiles()

if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_compiles.forget)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Collect garbage more rarely while this is open, in all threads."""
    compile_ = object()
    try:
        _compiles.begin(compile_)
        yield
    finally:
        _compiles.end(compile_)
