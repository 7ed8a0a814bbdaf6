"""Environment variables that are on or off."""

from __future__ import annotations

import os

from ort_dynamo.errors import InvalidVariableError

__all__ = ["read_switch"]


def read_switch(variable: str) -> bool | None:
    """Read an environment variable that is 0 or 1; None if it is not set, or empty.

    Raises:
        InvalidVariableError: it has another value.
    """
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise InvalidVariableError(name=variable, value=value, expected="0 or 1")
    return value == "1" if value else None
