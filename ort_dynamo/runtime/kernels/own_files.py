"""Check that files which a process trusts belong to its user, so that no other user can have written them."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["UNFINISHED", "FolderRefusedError", "belongs_to_another", "is_own_file", "is_own_folder", "write_own_file"]


UNFINISHED = ".unfinished-"
"""Begins the name that a file has until it is whole."""


class FolderRefusedError(Exception):
    """A folder, or a file in it, cannot be trusted; the message has the reason."""


def is_own_folder(path: Path) -> bool:
    """Check a folder; False where there is none.

    Raises:
        FolderRefusedError: another user can write to it, or it is no folder.
    """
    return _is_own(path, os.stat, stat.S_ISDIR, "folder")


def is_own_file(path: Path) -> bool:
    """Check a file of a folder that has been checked; False where there is none.

    Raises:
        FolderRefusedError: another user can write to it, or it is not a regular file.
    """
    return _is_own(path, os.lstat, stat.S_ISREG, "regular file")


def write_own_file(path: Path, data: bytes) -> None:
    """Write a file atomically, and create its folder if it is missing.

    Args:
        path: the path of the file.
        data: the content.

    Raises:
        FolderRefusedError: another user can write to the folder.
        OSError: the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_own_folder(path.parent)
    descriptor, name = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def belongs_to_another(status: os.stat_result) -> bool:
    """Check whether another user owns the file that has this status."""
    return hasattr(os, "getuid") and status.st_uid != os.geteuid()


def _is_own(path: Path, status_of: Callable[[Path], os.stat_result], is_kind: Callable[[int], bool], kind: str) -> bool:
    try:
        status = status_of(path)
    except FileNotFoundError:
        return False
    if not is_kind(status.st_mode):
        raise FolderRefusedError(f"{path} is not a {kind}")
    if belongs_to_another(status):
        raise FolderRefusedError(f"{path} belongs to another user")
    if hasattr(os, "getuid") and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FolderRefusedError(f"{path} can be written by other users (chmod go-w makes it yours alone)")
    return True
