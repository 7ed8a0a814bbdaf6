"""Reads a JSON file that may come from elsewhere: limited in size and depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_json"]

_MOST_BYTES = 1 << 20


def read_json(path: Path) -> Any:
    """Read a JSON file in UTF-8.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8 or not JSON, is larger than 1 MiB, or is nested deeper than Python's parser goes.
    """
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
