"""Suggest the name that a misspelt one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str]) -> str:
    """Find the nearest of the known names, as the end of a message: " (did you mean 'x'?)", or nothing."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
