"""Spells bytes and seconds."""

from __future__ import annotations

import os
import re
import sys

__all__ = ["shortened", "spelled_bytes", "spelled_seconds"]


def spelled_bytes(nbytes: float) -> str:
    """Spell a number of bytes: "1.50 MiB"."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
    return f"{nbytes / 1024:.4g} GiB"


def spelled_seconds(seconds: float) -> str:
    """Spell a time: "1.50 s", "1.50 ms" or "2 µs"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.0f} µs"


_FOLDERS = sorted({one.rstrip(os.sep) + os.sep for one in sys.path if os.path.isabs(one) and len(one) > 1}, key=len)
"""Folders of modules. A file's name below them says which it is."""

_PREFIX = re.compile("|".join(map(re.escape, reversed(_FOLDERS))))


_RESUMED = re.compile(r"\btorch_dynamo_resume_in_(\w+)_at_\d+")
"""Dynamo's name of the code after a graph break."""


def shortened(text: str) -> str:
    """Leave out the folders of modules in the paths of a text, and Dynamo's names of functions."""
    return _RESUMED.sub(r"\1", _PREFIX.sub("", text))
