"""Seal a file with its length and hash, publish it atomically, and check the seal before reading.

The seal fills the first 512 bytes, HDF5's user block, so programs that read HDF5 find the content after it. It is
checked before the HDF5 library, which is C code and trusts its input, reads one byte.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

from ort_dynamo.errors import CheckpointFileError

__all__ = ["SEAL_SIZE", "PathOrFile", "describe", "open_checked", "write_sealed"]

PathOrFile: TypeAlias = "str | bytes | os.PathLike[Any] | IO[bytes]"
"""A path, or an open binary file or object like one."""

SEAL_SIZE = 512
"""Bytes of the seal: the smallest user block that HDF5 has."""

_MAGIC = b"ort_dynamo checkpoint "
_VERSION = b"1"
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_PIECE = 2**20
"""Bytes that are hashed at a time."""


def write_sealed(target: PathOrFile, write: Callable[[IO[bytes]], object]) -> None:
    """Write a new sealed file.

    At a path the file is written completely or not at all, whenever the process stops: it is written beside the path,
    flushed to the disk, and renamed last, which fails if the name exists.

    Args:
        target: a path, or an empty binary file object, which is written from its start.
        write: writes the content into a given file, from byte `SEAL_SIZE` on.

    Raises:
        FileExistsError: the path exists, or the file object is not empty.
        OSError: the file cannot be written.
        TypeError: `target` is neither path nor file object.
    """
    if not isinstance(target, str | bytes | os.PathLike):
        _write_into_object(target, write)
        return
    path = Path(os.fsdecode(target))
    if os.path.lexists(path):
        raise _exists(str(path))
    # Made by open(), and so with the permissions that the process's umask leaves; tempfile would make it private.
    temporary = path.with_name(f".ort_checkpoint.{os.getpid()}-{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(temporary, "x+b") as file:
            _fill(file, write)
            os.fsync(file.fileno())
        _publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


@contextmanager
def open_checked(source: PathOrFile) -> Iterator[tuple[IO[bytes], bool]]:
    """Open a checkpoint file; give whether it is sealed. Files of older versions are not.

    The same open file is checked and read, so nobody can replace it in between.

    Raises:
        CheckpointFileError: the file is neither sealed nor HDF5, or its content does not match the seal.
        OSError: the file cannot be opened or read.
        TypeError: `source` is neither path nor file object.
    """
    if isinstance(source, str | bytes | os.PathLike):
        with open(source, "rb") as file:
            yield file, _check(file, describe(source))
        return
    if not all(hasattr(source, name) for name in ("read", "seek", "tell")):
        raise TypeError(f"a checkpoint is read from a path or a binary file object, not from {type(source).__name__}")
    yield source, _check(source, describe(source))


def describe(source: PathOrFile) -> str:
    """Name a path or file object in a message."""
    if isinstance(source, str | bytes | os.PathLike):
        return os.fsdecode(source)
    return f"<{type(source).__name__}>"


def _fill(file: IO[bytes], write: Callable[[IO[bytes]], object]) -> None:
    write(file)
    seal = _make_seal(file)
    file.seek(0)
    file.write(seal)
    file.flush()


def _make_seal(file: IO[bytes]) -> bytes:
    """Make the seal for the content after it in a file: text that `head -3` shows, then zeros."""
    file.seek(SEAL_SIZE)
    digest = hashlib.sha256()
    size = 0
    while piece := file.read(_PIECE):
        digest.update(piece)
        size += len(piece)
    text = _MAGIC + _VERSION + f"\nbytes {size}\nsha256 {digest.hexdigest()}\n".encode()
    return text.ljust(SEAL_SIZE, b"\0")


def _check(file: IO[bytes], name: str) -> bool:
    file.seek(0)
    start = file.read(SEAL_SIZE)
    if start.startswith(_HDF5_SIGNATURE):
        return False
    if not start.startswith(_MAGIC):
        raise CheckpointFileError(path=name, reason="it is not a checkpoint of an ORTTrainer, or its start is damaged")
    version = start[len(_MAGIC) :].split(b"\n", 1)[0]
    if version.isdigit() and int(version[:9]) > int(_VERSION):
        raise CheckpointFileError(
            path=name,
            reason=f"its format {version[:9].decode()} is newer than {_VERSION.decode()}, the newest known here",
        )
    if start != _make_seal(file):
        raise CheckpointFileError(
            path=name, reason="it is damaged or cut short: its length or hash has changed since it was saved"
        )
    return True


def _publish(temporary: Path, path: Path) -> None:
    """Give a finished file its name, unless that is taken."""
    try:
        os.link(temporary, path)  # unlike rename, it never replaces
    except FileExistsError:
        raise _exists(str(path)) from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without hard links: between this look and the move, a second saver could be replaced.
        if os.path.lexists(path):
            raise _exists(str(path)) from None
        os.rename(temporary, path)


def _flush_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk; only POSIX systems can."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_into_object(target: IO[bytes], write: Callable[[IO[bytes]], object]) -> None:
    if not hasattr(target, "write"):
        raise TypeError(f"a checkpoint is saved to a path or a binary file object, not to {type(target).__name__}")
    if hasattr(target, "seekable") and target.seekable():
        if target.seek(0, os.SEEK_END):
            raise _exists(describe(target))
        target.seek(0)
    with tempfile.TemporaryFile() as file:
        _fill(file, write)
        file.seek(0)
        shutil.copyfileobj(file, target, _PIECE)


def _exists(name: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
