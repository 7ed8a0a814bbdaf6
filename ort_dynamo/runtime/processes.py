"""Sessions belong to the process that opened them.

`os.fork` copies a session without its threads. A child that runs the copy computes correctly: the calling thread does
the work of the missing ones. But a child that frees it (at exit, or with a compiled model) waits for threads that do
not exist: onnxruntime 1.31.1 hangs or crashes. So a child never frees the copies, and opens its own sessions for the
graphs that it runs. Each call compares two integers for this.

The CUDA provider does not get this far: torch itself refuses CUDA in a forked child.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["current", "keep_alive_at_exit", "own_session", "profiles_until_exit"]

current: int = 0
"""Number of forks between the first process and this one; it differs in a forked child."""

_sessions: weakref.WeakSet[Any] = weakref.WeakSet()
_staying: weakref.WeakSet[Any] = weakref.WeakSet()
_profiling: weakref.WeakSet[Any] = weakref.WeakSet()


def own_session(opened: Callable[[], Any]) -> Any:
    """Return the InferenceSession that `opened` returns, which a forked child is not going to free."""
    session = opened()
    _sessions.add(session)
    return session


def keep_alive_at_exit(session: Any) -> None:
    """Leave an InferenceSession to the system at exit, since freeing it would call Python."""
    _staying.add(session)


def profiles_until_exit(session: Any) -> None:
    """Have the end of the interpreter write the profile of an InferenceSession that is still open then."""
    _profiling.add(session)


def _write_profiles() -> None:
    for session in list(_profiling):
        session.end_profiling()


def _never_freed(sessions: weakref.WeakSet[Any]) -> None:
    for session in sessions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(session, "_sess", session)))  # for good
    sessions.clear()


def _in_child() -> None:
    global current
    current += 1
    _profiling.clear()
    _never_freed(_sessions)


atexit.register(_never_freed, _staying)
atexit.register(_write_profiles)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)
