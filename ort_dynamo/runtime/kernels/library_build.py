"""Builds the C library of fused operators with the machine's C compiler, and stores it by its content."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ort_dynamo.runtime.kernels.fused_kernel import Unavailable
from ort_dynamo.runtime.kernels.own_files import FolderRefusedError, is_own_file, is_own_folder, write_own_file

__all__ = ["built_library", "compilers"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=ort_dynamo shows it

_CODE = Path(__file__).with_name("fused.c")
_FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread")
_SECONDS = 120
"""After which a compiler is given up; it needs one."""


def built_library(folder: Path | None) -> tuple[Path, ctypes.CDLL] | Unavailable:
    """Load the library, after building it unless an earlier process has.

    Args:
        folder: the folder of the library, which is created if it is missing. If it is None or cannot be used, it is a
            private folder of the process.
    """
    image: bytes | None = None
    reasons = []
    for place in _places(folder):
        path = place / f"{_name()}.so"
        try:
            if is_own_folder(place) and is_own_file(path):
                try:
                    return path, ctypes.CDLL(str(path))
                except OSError as error:
                    reasons.append(str(error))  # it is damaged, and is built anew
            if image is None:
                made = _compiled()
                if isinstance(made, Unavailable):
                    return made
                image = made
            write_own_file(path, image)
            return path, ctypes.CDLL(str(path))
        except (FolderRefusedError, OSError) as error:
            _log.info("ort_train: the library of fused kernels is not stored in %s: %s", place, error)
            reasons.append(str(error))
    return Unavailable("; ".join(reasons))


def compilers() -> list[list[str]]:
    """Return the commands of C compilers to try: that of the variable CC, gcc, clang."""
    return [command for command in (shlex.split(os.environ.get("CC", "")), ["gcc"], ["clang"]) if command]


def _places(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder.absolute()
    yield _private_folder()


@functools.cache
def _private_folder() -> Path:
    """Return a folder that is removed at the end of the process, but not of a fork of it."""
    path, owner = tempfile.mkdtemp(prefix="ort_dynamo-"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return Path(path)


@functools.cache
def _name() -> str:
    """Return the library's name, by the source, the flags, and all in which machines with one home may differ."""
    machine = " ".join((platform.system(), platform.machine(), *platform.libc_ver()))
    parts = (_CODE.read_bytes(), _CODE.with_suffix(".h").read_bytes(), " ".join(_FLAGS).encode(), machine.encode())
    return "fused-" + hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _compiled() -> bytes | Unavailable:
    """Return the library as the first compiler that can makes it."""
    reasons = []
    with tempfile.TemporaryDirectory(prefix="ort_dynamo-") as folder:
        made = Path(folder) / "fused.so"
        for compiler in compilers():
            if shutil.which(compiler[0]) is None:
                reasons.append(f"there is no {compiler[0]}")
                continue
            command = [*compiler, *_FLAGS, "-o", str(made), str(_CODE), "-ldl"]
            try:
                subprocess.run(
                    command, check=True, capture_output=True, stdin=subprocess.DEVNULL, text=True, timeout=_SECONDS
                )
                return made.read_bytes()
            except subprocess.CalledProcessError as error:
                said = error.stderr.strip().splitlines()
                reasons.append(f"{compiler[0]} failed: {said[0] if said else error.returncode}")
            except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
                reasons.append(f"{compiler[0]} failed: {error}")
    return Unavailable("; ".join(reasons))
