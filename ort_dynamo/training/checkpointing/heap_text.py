"""Reads a text of variable length from HDF5's global heap.

The HDF5 library trusts the length that a text claims to have, which damage can change. It first allocates and fills so
much memory (1.14.2 and 2.0.0): 4 GB for a file of 23 kB. Where the claim is too small, 1.14.2 writes the whole text
into a buffer of that size, and the process dies. So the library is not asked. The layout is that of the HDF5 File
Format Specification, III.E "Global Heap", with addresses and lengths of 8 bytes.
"""

from __future__ import annotations

import struct
from typing import IO

__all__ = ["read_heap_text"]

_REFERENCE = struct.Struct("<IQI")
"""A dataset's reference to a text: its bytes, the address of its collection, its index there."""

_COLLECTION = struct.Struct("<4sB3xQ")
"""Signature, version, bytes of the collection with this header."""

_OBJECT = struct.Struct("<HH4xQ")
"""Index, count of references, bytes; these follow, padded to a multiple of 8. Index 0 is the free space, at the end."""


def read_heap_text(file: IO[bytes], offset: int, base: int, size: int) -> bytes:
    """Read the text that a scalar dataset refers to.

    Args:
        file: the HDF5 file.
        offset: bytes from the file's start to the dataset's content.
        base: bytes from the file's start to where addresses count from.
        size: bytes of the file.

    Raises:
        ValueError: the file is damaged there.
    """
    length, address, index = _REFERENCE.unpack(_read(file, offset, _REFERENCE.size, size))
    if length == 0:
        return b""
    place = base + address
    signature, version, collection = _COLLECTION.unpack(_read(file, place, _COLLECTION.size, size))
    end = place + collection
    if signature != b"GCOL" or version != 1 or end > size:
        raise ValueError(f"there is no heap at byte {place}")
    place += _COLLECTION.size
    while place + _OBJECT.size <= end:
        found, _, content = _OBJECT.unpack(_read(file, place, _OBJECT.size, size))
        place += _OBJECT.size
        if found == index != 0:
            if content < length or place + content > end:
                break
            return _read(file, place, length, size)
        if found == 0:
            break
        place += (content + 7) // 8 * 8
    raise ValueError(f"the heap has no text {index} of {length} bytes")


def _read(file: IO[bytes], place: int, count: int, size: int) -> bytes:
    if place + count > size:
        raise ValueError(f"the file ends before byte {place + count}")
    file.seek(place)
    return file.read(count)
