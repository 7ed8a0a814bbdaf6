"""Checks that files which a process trusts belong to its user, so that nobody else can have put them there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["FolderRefusedError", "belongs_to_another", "is_own_file", "is_own_folder"]


class FolderRefusedError(Exception):
    """A folder, or a file in it, is not to be trusted; the message says why."""


def is_own_folder(path: Path) -> bool:
    """Check a folder; False where there is none.

    Raises:
        FolderRefusedError: another user can write to it, or it is no folder.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        raise FolderRefusedError(f"{path} is no folder")
    _refuse_others(path, status)
    return True


def is_own_file(path: Path) -> bool:
    """Check a file of a folder that has been checked; False where there is none.

    Raises:
        FolderRefusedError: another user can write to it, or it is no regular file.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode):
        raise FolderRefusedError(f"{path} is no regular file")
    _refuse_others(path, status)
    return True


def belongs_to_another(status: os.stat_result) -> bool:
    """Whether another user owns what has this status."""
    return hasattr(os, "getuid") and status.st_uid != os.geteuid()


def _refuse_others(path: Path, status: os.stat_result) -> None:
    if belongs_to_another(status):
        raise FolderRefusedError(f"{path} belongs to another user")
    if hasattr(os, "getuid") and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise FolderRefusedError(f"{path} can be written by other users (chmod go-w makes it yours alone)")
