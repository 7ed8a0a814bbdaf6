"""Checks of option values that several options share."""

from __future__ import annotations

import os
from typing import Any

from ort_dynamo.errors import InvalidOptionError

__all__ = ["MOST_THREADS", "checked_path", "is_bool", "is_count", "is_thread_count", "one_of"]


MOST_THREADS = 4096
"""Threads of a session at most: more than machines have, and few enough to start."""


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise InvalidOptionError unless a value is one of those allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise InvalidOptionError(name=name, value=value, expected="one of " + ", ".join(map(repr, allowed)))


def is_bool(name: str, value: object) -> None:
    """Raise InvalidOptionError unless a value is a bool."""
    if not isinstance(value, bool):
        raise InvalidOptionError(name=name, value=value, expected="True or False")


def is_count(name: str, value: object) -> None:
    """Raise InvalidOptionError unless a value is None or a positive int of 32 bits, as ONNX Runtime takes."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidOptionError(name=name, value=value, expected="None or an int >= 1")
    if value >= 1 << 31:
        raise InvalidOptionError(name=name, value=value, expected="None or an int >= 1 of 32 bits")


def is_thread_count(name: str, value: object) -> None:
    """Raise InvalidOptionError unless a value is None or a number of threads that a machine may have.

    A session starts all its threads when it opens, and ONNX Runtime cannot be interrupted there.
    """
    is_count(name, value)
    if isinstance(value, int) and value > MOST_THREADS:
        raise InvalidOptionError(name=name, value=value, expected=f"None or an int from 1 to {MOST_THREADS}")


def checked_path(name: str, value: Any) -> str | None:
    """Return a path as text, or None for None; raise InvalidOptionError for any other value."""
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ""
    if not path or not isinstance(path, str) or "\0" in path or not _is_encodable(path):
        raise InvalidOptionError(name=name, value=value, expected="None or the path of a folder")
    return path


def _is_encodable(path: str) -> bool:
    """Check whether the file system can have a name: not with half of a surrogate pair."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True
