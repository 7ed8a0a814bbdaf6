"""Reads which libraries a shared library of Linux needs, without loading it."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

__all__ = ["Dependencies", "dependencies"]

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 10, 15, 29
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
_ENTRY = struct.Struct("<qQ")  # Elf64_Dyn


class Dependencies(NamedTuple):
    """The loader entries of a shared library.

    Attributes:
        needed: names of the libraries that it needs, in the order in which the loader looks for them.
        folders: absolute paths of the folders where the loader looks first.
    """

    needed: tuple[str, ...]
    folders: tuple[str, ...]


def dependencies(path: Path) -> Dependencies | None:
    """Read the dynamic section of a shared library; None for a file that is no 64-bit little-endian ELF.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
        if len(start) < _HEADER.size or start[:6] != b"\x7fELF\x02\x01":
            return None
        _, _, _, _, _, offset, _, _, _, size, count, *_ = _HEADER.unpack(start)
        segments = [_SEGMENT.unpack(_read(file, offset + i * size, _SEGMENT.size)) for i in range(count)]
        loaded = [(address, at, length) for kind, _, at, address, _, length, *_ in segments if kind == _PT_LOAD]
        entries: list[tuple[int, int]] = []
        for kind, _, at, _, _, length, *_ in segments:
            if kind == _PT_DYNAMIC:
                entries += _ENTRY.iter_unpack(_read(file, at, length - length % _ENTRY.size))
        if (_DT_NULL, 0) in entries:
            entries = entries[: entries.index((_DT_NULL, 0))]
        found = dict(entries)
        if _DT_STRTAB not in found:
            return Dependencies((), ())
        table = found[_DT_STRTAB]
        place = next(at + table - address for address, at, length in loaded if address <= table < address + length)
        strings = _read(file, place, found[_DT_STRSZ])

    def texts(*tags: int) -> list[str]:
        return [strings[value : strings.index(b"\0", value)].decode() for tag, value in entries if tag in tags]

    origin = str(path.resolve().parent)
    folders = [folder for text in texts(_DT_RPATH, _DT_RUNPATH) for folder in text.split(":") if folder]
    expanded = [folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in folders]
    return Dependencies(tuple(texts(_DT_NEEDED)), tuple(map(os.path.normpath, expanded)))


def _read(file: BinaryIO, offset: int, length: int) -> bytes:
    file.seek(offset)
    return file.read(length)
