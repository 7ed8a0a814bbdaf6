"""Seals a file with its length and hash, publishes it whole or not at all, and checks the seal before it is read.

The seal fills the first 512 bytes, which HDF5 calls the user block and leaves to its users: a program that reads HDF5
finds the content behind it. It is checked before the HDF5 library, which is C and trusts its input, sees one byte.
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

    At a path the file is there whole or not at all, whenever the process is stopped: it is written beside the path,
    flushed to the disk, and given its name last, which fails where that name is taken.

    Args:
        target: a path, or a binary file object, which has to be empty and is written from its start.
        write: writes the content into the file it is given, from byte `SEAL_SIZE` on.

    Raises:
        FileExistsError: there is something at the path, or in the file object.
        OSError: it cannot be written.
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
    """Open a checkpoint file, and say whether it is sealed; a file of older versions is not.

    The same open file is checked and then read, so nothing can be put in its place between the two.

    Raises:
        CheckpointFileError: it is neither a sealed file nor HDF5, or its content is not the sealed one.
        OSError: it cannot be opened or read.
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
    """Make the seal of the content behind it in a file: text that `head -3` shows, then zeros."""
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
