"""Writes a dictionary's key as the name of an HDF5 link and back: HDF5 has no name "", ".", "a/b" or with a NUL."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

__all__ = ["key_of", "name_of"]

_UNFIT = re.compile("[%/\0\ud800-\udfff]")


def name_of(key: str) -> str:
    """Encode a key as an HDF5 name; characters that HDF5 cannot have become "%" and two hexadecimal digits."""
    if key == "":
        return "%"
    if key == ".":
        return "%2E"
    return _UNFIT.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass")), key)


def key_of(name: str) -> str:
    """Read the key that `name_of` wrote; raises ValueError for a name that it writes for no key."""
    key = "" if name == "%" else unquote_to_bytes(name.encode()).decode("utf-8", "surrogatepass")
    if name_of(key) != name:
        raise ValueError(f"{name!r} is not the name of a key")
    return key
