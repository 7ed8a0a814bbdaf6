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
from io import FileIO
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


class _Held:
    """A lock file that frees its lock once nothing refers to it, such as after an interrupt between two lines."""

    def __init__(self, path: Path) -> None:
        self._file = FileIO(path, "r+", opener=lambda name, _: os.open(name, _FLAGS, 0o600))

    def lock(self) -> bool:
        """Lock the file, and say whether that succeeded."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, path: Path) -> bool:
        """Check whether the file is still there under its name."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Free the lock, if it is held; closing alone would leave it to children that were forked since."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # the file could be opened
            self.close()


@contextlib.contextmanager
def build_lock(lock: Path, is_made: Callable[[], bool]) -> Iterator[None]:
    """Hold a lock while the body looks for something and makes it, or wait until another process has made it.

    Args:
        lock: a file, which is made and removed.
        is_made: whether the thing is there.

    Raises:
        OSError: the file cannot be made.
    """
    held = _locked(lock, is_made) if fcntl is not None else None
    try:
        yield
    finally:
        if held is not None:
            with contextlib.suppress(OSError):  # somebody has cleared the folder, or closed it
                os.unlink(lock)
            held.close()


def _locked(lock: Path, is_made: Callable[[], bool]) -> _Held | None:
    """Return the lock, or None where there is nothing to wait for any more."""
    end = time.monotonic() + PATIENCE
    file = _Held(lock)
    if not (locked := file.lock()):
        stage("waiting for another process that compiles the same graph")
    while not locked and not is_made() and time.monotonic() < end:
        time.sleep(_PAUSE)
        locked = file.lock()
    # A maker that was killed leaves its file: one of those that waited takes over. One that has ended removes it,
    # and if it has made nothing (a full disk, say), to make it one after the other would gain nothing.
    if locked and file.is_at(lock):
        return file
    file.close()
    return None
