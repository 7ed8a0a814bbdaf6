"""Lets one of several processes make something while the others wait for it.

The lock is the system's, on a file: it is gone when its process is, however that ends. Whoever waits stops when the
thing is there, when the maker has given up, or after `PATIENCE` seconds, should the maker hang; then it makes the thing
itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ort_dynamo.program.progress import stage

try:
    import fcntl
except ImportError:  # Windows, where each process makes its own
    fcntl = None  # type: ignore[assignment]

__all__ = ["PATIENCE", "build_lock"]

PATIENCE = 120.0
"""Seconds that a process waits for another one."""

_PAUSE = 0.01
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


@contextlib.contextmanager
def build_lock(lock: Path, is_made: Callable[[], bool]) -> Iterator[None]:
    """Hold a lock while the body looks for something and makes it, or wait until another process has made it.

    Args:
        lock: a file, which is made and removed.
        is_made: whether the thing is there.

    Raises:
        OSError: the file cannot be made.
    """
    descriptor = _locked(lock, is_made) if fcntl is not None else None
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):  # somebody has cleared the folder, or closed it
                os.unlink(lock)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would leave it to children that were forked since
            os.close(descriptor)


def _locked(lock: Path, is_made: Callable[[], bool]) -> int | None:
    """Return the descriptor of the lock, or None where there is nothing to wait for any more."""
    end = time.monotonic() + PATIENCE
    descriptor = os.open(lock, _FLAGS, 0o600)
    held = False
    try:
        if not (locked := _try_to_lock(descriptor)):
            stage("waiting for another process that compiles the same graph")
        while not locked and not is_made() and time.monotonic() < end:
            time.sleep(_PAUSE)
            locked = _try_to_lock(descriptor)
        # A maker that was killed leaves its file: one of those that waited takes over. One that has ended removes it,
        # and if it has made nothing (a full disk, say), to make it one after the other would gain nothing.
        held = locked and _is_still(lock, descriptor)
        return descriptor if held else None
    finally:
        if not held:
            os.close(descriptor)


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(lock: Path, descriptor: int) -> bool:
    """Check whether the file is still there under its name."""
    try:
        return os.path.samestat(os.stat(lock), os.fstat(descriptor))
    except FileNotFoundError:
        return False
