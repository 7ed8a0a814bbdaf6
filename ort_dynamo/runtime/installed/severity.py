"""Keeps warnings of ONNX Runtime's default logger off the terminal for a while."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from ort_dynamo.runtime.installed.importing import onnxruntime

__all__ = ["errors_only"]

_WARNING, _ERROR = 2, 3

_lock = threading.Lock()
_inside = 0


def _in_child() -> None:
    """Forget the threads of the parent, one of which may have held the lock."""
    global _lock, _inside
    _lock, _inside = threading.Lock(), 0


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Make the default logger print errors only, until the last thread has left this context.

    The binding logs there before a session exists, where the session's own severity does not hold. ONNX Runtime cannot
    be asked for the severity of before: its own default, warnings, is put back.
    """
    global _inside
    with _lock:
        _inside += 1
        onnxruntime().set_default_logger_severity(_ERROR)
    try:
        yield
    finally:
        with _lock:
            _inside = max(_inside - 1, 0)  # a forked child forgets the contexts that its parent was in
            if not _inside:
                onnxruntime().set_default_logger_severity(_WARNING)
