"""A folder of cache entries that the processes of one user share, with complete files and a size limit.

An entry is one file. It is written beside its path and then moved there, so readers never see a part of it. If two
processes write the same entry, the second replaces an equal file. Only regular files of the user are read; no link is
followed, and nothing is executed. A process may wait for another one that builds the entry it needs, but not for one
that has ended, nor for long (`build_lock.py`).
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ort_dynamo.cache.build_lock import build_lock
from ort_dynamo.runtime.kernels.own_files import (
    UNFINISHED,
    FolderRefusedError,
    belongs_to_another,
    is_own_folder,
    write_own_file,
)

__all__ = ["SUFFIX", "CacheFolder", "FolderRefusedError", "StoredEntry"]

SUFFIX = ".island"
_ABANDONED = 3600.0
"""Seconds after which an unfinished file belongs to a process that has ended."""

_LARGEST = 2**31
"""Bytes: protobuf's own limit of a model."""

_PART_OF_KERNELS = 8
"""Compiled kernels take at most this part of the size beside the entries: 256 MiB of 2 GiB, some ten thousand."""

_PROCESSES = 8
"""A process lists the files again after writing this part of the free bytes: others may write at the same time."""

_unlisted: dict[tuple[Path, int], int] = {}
"""Folder and its maximum size -> bytes that this process may write before it lists the files again."""

_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class StoredEntry:
    """One file of the folder.

    Attributes:
        key: its key.
        path: the file.
        nbytes: its size.
        used: the time of the last read or write, in seconds since the epoch.
    """

    key: str
    path: Path
    nbytes: int
    used: float


class CacheFolder:
    """Files by key with a size limit; the least recently used are removed first.

    Args:
        path: the folder, which is created with the first file.
        max_bytes: the maximum bytes of all files.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes

    def kernels(self) -> CacheFolder:
        """Return the folder in this one that holds compiled kernels."""
        return CacheFolder(self.path / "kernels", self.max_bytes // _PART_OF_KERNELS)

    def read(self, key: str) -> bytes | None:
        """Read a file, and record its use; None if it does not exist.

        Raises:
            FolderRefusedError: the folder or the file cannot be trusted.
            OSError: the file cannot be read.
        """
        if not is_own_folder(self.path):
            return None
        try:
            descriptor = os.open(self._place(key), _FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            if os.path.islink(self._place(key)):
                raise FolderRefusedError("it is a link") from error
            raise
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise FolderRefusedError("it is not a regular file")
            if belongs_to_another(status):
                raise FolderRefusedError("it belongs to another user")
            if status.st_size > min(_LARGEST, self.max_bytes):
                raise FolderRefusedError(f"it is too large for an entry: {status.st_size} bytes")
            with contextlib.suppress(OSError):  # a folder that can only be read keeps the times that it has
                os.utime(descriptor if os.utime in os.supports_fd else self._place(key))
            return file.read(status.st_size)

    def holds(self, key: str) -> bool:
        """Check whether a file of this key is there, without a look at its contents."""
        return os.path.isfile(self._place(key))

    def write(self, key: str, data: bytes) -> None:
        """Write a file atomically, and make room for it.

        Raises:
            FolderRefusedError: the folder cannot be trusted.
            OSError: the file cannot be written.
        """
        if len(data) > min(_LARGEST, self.max_bytes):
            return
        write_own_file(self._place(key), data)
        limit = self.path, self.max_bytes
        _unlisted[limit] = _unlisted.get(limit, 0) - len(data)
        if _unlisted[limit] < 0:
            _unlisted[limit] = self.make_room() // _PROCESSES

    def build_lock(self, key: str) -> AbstractContextManager[None]:
        """Become the only process that builds a file, or wait until it exists.

        Raises (when it is entered):
            FolderRefusedError: the folder cannot be trusted.
            OSError: the lock cannot be written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_own_folder(self.path)
        return build_lock(self.path / f"{UNFINISHED}{key}.lock", partial(self.holds, key))

    def make_room(self) -> int:
        """Remove files until the others fit, and unfinished files of processes that are gone; give the free bytes."""
        entries = sorted(self.entries(), key=lambda one: one.used)
        excess = sum(one.nbytes for one in entries) - self.max_bytes
        for entry in entries:
            if excess <= 0:
                break
            excess -= entry.nbytes
            entry.path.unlink(missing_ok=True)
        for name in self._names():
            if name.startswith(UNFINISHED):
                with contextlib.suppress(OSError):  # its process may have finished, or another removed it
                    if time.time() - os.lstat(self.path / name).st_mtime > _ABANDONED:
                        os.unlink(self.path / name)
        return -excess

    def entries(self) -> list[StoredEntry]:
        """All files, in no order.

        Raises:
            FolderRefusedError: the folder is not to be trusted.
        """
        if not is_own_folder(self.path):
            return []
        found = []
        for name in self._names():
            if not name.endswith(SUFFIX):
                continue
            path = self.path / name
            try:
                status = os.lstat(path)
            except FileNotFoundError:  # removed since
                continue
            if stat.S_ISREG(status.st_mode):
                found.append(StoredEntry(name.removesuffix(SUFFIX), path, status.st_size, status.st_mtime))
        return found

    def clear(self, unused: float = 0.0) -> int:
        """Remove entries and unfinished files, and return their number.

        Args:
            unused: remove entries that have not been used for this many seconds; 0 removes all.
        """
        if not is_own_folder(self.path):
            return 0
        names = [name for name in self._names() if name.endswith(SUFFIX) or name.startswith(UNFINISHED)]
        removed = 0
        last = time.time() - unused
        for name in names:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                if unused and os.lstat(self.path / name).st_mtime > last:
                    continue
                os.unlink(self.path / name)
                removed += 1
        return removed

    def _place(self, key: str) -> Path:
        return self.path / f"{key}{SUFFIX}"

    def _names(self) -> Iterator[str]:
        with os.scandir(self.path) as found:
            yield from [one.name for one in found]
