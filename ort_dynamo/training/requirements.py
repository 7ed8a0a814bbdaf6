"""The check of arguments that ONNX Runtime's training classes make."""

from __future__ import annotations

__all__ = ["is_number", "require"]


def require(condition: bool, message: str) -> None:
    """Check an argument; unlike an assert statement, also under `python -O`.

    Raises:
        AssertionError: the condition is false: the type that programs written for ONNX Runtime's classes catch.
    """
    if not condition:
        raise AssertionError(message)


def is_number(value: object) -> bool:
    """Check whether a value is a float or an int, and not NaN."""
    return isinstance(value, (int, float)) and value == value
