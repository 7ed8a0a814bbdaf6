"""Makes text of cerberus's errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerberus.errors import BasicErrorHandler

__all__ = ["DocumentErrors", "unsorted_keys"]


class DocumentErrors(BasicErrorHandler):  # type: ignore[misc]  # cerberus has no types
    """Makes text of errors without their values.

    cerberus makes deep copies of them, which fails for values that cannot be copied: a SessionOptions, a lock. No
    message of ours has a value.
    """

    def add(self, error: Any) -> None:
        """Take an error up."""
        _forget_values(error)
        super().add(error)


def _forget_values(error: Any) -> None:
    error.value = None
    for child in error.child_errors or ():
        _forget_values(child)


def unsorted_keys(document: Mapping[Any, Any]) -> dict[Any, list[str]]:
    """Find the keys of a document that are neither text nor ints: cerberus sorts errors by keys, and fails at these."""
    return {key: ["unknown field"] for key in document if not isinstance(key, (str, int))}
