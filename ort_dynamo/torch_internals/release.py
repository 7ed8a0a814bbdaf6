"""Versions are compared by their releases."""

from __future__ import annotations

import logging
import re

__all__ = ["release", "say_if_newer"]


def release(version: str) -> tuple[int, ...]:
    """(major, minor) of a version such as "2.15.0+cu132", "2.16.0a0+git1234567" or "1.33rc1"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def say_if_newer(log: logging.Logger, package: str, version: str, newest: str) -> None:
    """Log at INFO that a package is of a later release than `newest`, the newest that was tested."""
    if release(version) > release(newest):
        log.info("%s %s is newer than %s, the newest that ort_dynamo was tested with", package, version, newest)
