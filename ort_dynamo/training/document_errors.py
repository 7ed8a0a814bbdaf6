"""Makes text of cerberus's errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cerberus.errors import BasicErrorHandler

from ort_dynamo.embedding import nearest

__all__ = ["DocumentErrors", "did_you_mean", "unsorted_keys"]

_UNKNOWN = "unknown field"


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


def did_you_mean(errors: Mapping[Any, Any], schema: Mapping[str, Any]) -> str:
    """Name the known key that is nearest to each unknown one, as lines after the errors' text; "" if none is near."""
    return "".join(f"\n{key!r} is not known{near}" for key, near in _near(errors, schema))


def _near(errors: Mapping[Any, Any], schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, found in errors.items():
        inner = schema.get(key, {}).get("schema")
        for error in found:
            if error == _UNKNOWN and (near := nearest(str(key), map(str, schema))):
                yield key, near
            elif isinstance(error, Mapping) and isinstance(inner, Mapping):
                yield from _near(error, inner)


def unsorted_keys(document: Mapping[Any, Any]) -> dict[Any, list[str]]:
    """Find the keys of a document that are neither text nor ints: cerberus sorts errors by keys, and fails at these."""
    return {key: [_UNKNOWN] for key in document if not isinstance(key, (str, int))}
