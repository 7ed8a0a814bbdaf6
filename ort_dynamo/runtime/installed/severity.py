"""Keeps warnings of ONNX Runtime's default logger off the terminal for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from ort_dynamo.runtime.installed.importing import onnxruntime

__all__ = ["errors_only"]

_WARNING, _ERROR = 2, 3

_lock = threading.Lock()
_inside = 0


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
            _inside -= 1
            if not _inside:
                onnxruntime().set_default_logger_severity(_WARNING)
