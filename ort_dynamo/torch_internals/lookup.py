"""Asks torch for a private name, once, and remembers missing ones."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["missing", "private"]

_missing: set[str] = set()


def private(path: str, otherwise: Any = None) -> Any:
    """Give the object at `path`, "module:attribute" or "module", or `otherwise` if the installed torch lacks it."""
    try:
        return _find(path)
    except (ImportError, AttributeError):
        _missing.add(path)
        return otherwise


def _find(path: str) -> Any:
    module, _, attribute = path.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def missing() -> tuple[str, ...]:
    """Return the private names that were asked for so far and that the installed torch lacks, sorted."""
    return tuple(sorted(_missing))
