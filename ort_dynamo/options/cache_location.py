"""Finds the folder of the stored graphs: options name it, else environment variables."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ort_dynamo.errors import InvalidVariableError
from ort_dynamo.program.switches import read_switch

__all__ = [
    "DEFAULT_BYTES",
    "DIRECTORY",
    "SIZE",
    "SWITCH",
    "TRACE_SWITCH",
    "CacheLocation",
    "NoHomeError",
    "cache_location",
    "traces_are_cached",
]

SWITCH = "ORT_DYNAMO_CACHE"
TRACE_SWITCH = "ORT_DYNAMO_TRACE_CACHE"
DIRECTORY = "ORT_DYNAMO_CACHE_DIR"
SIZE = "ORT_DYNAMO_CACHE_SIZE"

DEFAULT_BYTES = 2**31
"""2 GiB: some thousand models of the size of BERT."""

_SIZE = re.compile(r"(?P<number>\d{1,18}(\.\d{1,18})?)\s*(?P<unit>[kmgt]?)(?P<binary>i?)b?", re.IGNORECASE)


class NoHomeError(InvalidVariableError):
    """The folder of the cache is in a home directory, and the user has none."""

    message = "There is no home directory for the cache in {value!r}: set ORT_DYNAMO_CACHE_DIR to an absolute path."


@dataclass(frozen=True)
class CacheLocation:
    """A folder for entries.

    Attributes:
        path: the folder, which may not exist yet.
        max_bytes: its maximum size.
    """

    path: Path
    max_bytes: int


def cache_location(disk_cache: bool | None = None, cache_dir: str | None = None) -> CacheLocation | None:
    """Decide where compiled graphs are stored; None if they are not stored.

    Args:
        disk_cache: the option; None uses ORT_DYNAMO_CACHE, which is on unless it is 0.
        cache_dir: the option; None uses ORT_DYNAMO_CACHE_DIR, or else the user's cache folder of the platform.

    Raises:
        InvalidVariableError: ORT_DYNAMO_CACHE or ORT_DYNAMO_CACHE_SIZE has an invalid value.
        NoHomeError: the folder is in a home directory, and there is none.
    """
    if (read_switch(SWITCH) if disk_cache is None else disk_cache) is False:
        return None
    named = cache_dir or os.environ.get(DIRECTORY, "")
    try:
        path = Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("ort_dynamo", appauthor=False))
    except RuntimeError as error:  # a container's user may have no entry in the system's list
        raise NoHomeError(value=named or "~/.cache/ort_dynamo") from error
    return CacheLocation(path.absolute(), _max_bytes())


def traces_are_cached(trace_cache: bool | None = None) -> bool | None:
    """Check whether torch should store AOTAutograd's results; None if neither option nor variable is set.

    Args:
        trace_cache: the option; None uses ORT_DYNAMO_TRACE_CACHE.

    Raises:
        InvalidVariableError: ORT_DYNAMO_TRACE_CACHE has an invalid value.
    """
    return read_switch(TRACE_SWITCH) if trace_cache is None else trace_cache


def _max_bytes() -> int:
    value = os.environ.get(SIZE, "")
    if not value:
        return DEFAULT_BYTES
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise InvalidVariableError(name=SIZE, value=value, expected="a number of bytes, such as 500MB or 2GiB")
    power = " kmgt".index(match["unit"].lower() or " ")
    return int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)
