"""The code of this package as a digest: no version of the sources reads files that another version wrote."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

__all__ = ["source_digest"]

_PACKAGE = Path(__file__).resolve().parent.parent
_KINDS = (".py", ".json")


@cache
def source_digest() -> str:
    """SHA-256, as hex, of the names and contents of this package's modules and tables."""
    found = hashlib.sha256()
    files = [
        Path(folder, name)
        for folder, _, names in os.walk(_PACKAGE, followlinks=True)  # passes/ is a link in a checkout
        for name in names
        if name.endswith(_KINDS)
    ]
    for file in sorted(files, key=lambda file: file.relative_to(_PACKAGE).as_posix()):
        content = file.read_bytes()
        found.update(f"{file.relative_to(_PACKAGE).as_posix()} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()
