"""Sets the attributes of ONNX Runtime's SessionOptions that a program asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ort_dynamo.errors import InvalidOptionError, UnknownSettingError
from ort_dynamo.options.checks import MOST_THREADS
from ort_dynamo.options.session_attributes import attribute_names
from ort_dynamo.options.spelling import nearest
from ort_dynamo.runtime.installed.capabilities import installed_runtime
from ort_dynamo.runtime.installed.importing import onnxruntime

__all__ = ["check_attributes", "set_attributes"]

_RANGES = {
    "log_severity_level": range(-1, 5),
    "inter_op_num_threads": range(MOST_THREADS + 1),
}
"""Attribute -> the values that ONNX Runtime takes where its setter takes more."""


def check_attributes(given: Sequence[tuple[str, str | int | bool]]) -> None:
    """Raise as `set_attributes` does, before a graph is traced."""
    if given:
        set_attributes(onnxruntime().SessionOptions(), given)


def set_attributes(settings: Any, given: Sequence[tuple[str, str | int | bool]]) -> None:
    """Set attributes of an onnxruntime.SessionOptions.

    Args:
        settings: the SessionOptions.
        given: names and values; an enumeration is an integer here.

    Raises:
        UnknownSettingError: there is no such attribute.
        InvalidOptionError: an attribute does not take the value.
    """
    known = attribute_names(settings) if given else []
    for attribute, value in given:
        if attribute not in known:
            runtime = installed_runtime()
            owner = f"SessionOptions of {runtime.package} {runtime.version}"
            near = nearest(attribute, known) or f"; it has {', '.join(known)}"
            raise UnknownSettingError(
                name="session_options", owner=owner, kind="attribute", value=attribute, nearest=near
            )
        kind = type(getattr(settings, attribute))
        expected = f"a value of type {kind.__name__}"
        allowed: Sequence[int] | None = _RANGES.get(attribute)
        if members := getattr(kind, "__members__", {}):
            allowed = [int(member) for member in members.values()]
            expected += ": " + ", ".join(f"{int(member)} ({name})" for name, member in members.items())
        elif allowed is not None:
            expected = f"an int from {allowed[0]} to {allowed[-1]}"
        try:
            if not _is_of(kind, value) or (allowed is not None and int(value) not in allowed):
                raise ValueError("it is not one of its type")
            setattr(settings, attribute, kind(value))
        except (TypeError, ValueError) as error:
            name = f"session_options[{attribute!r}]"
            raise InvalidOptionError(name=name, value=value, expected=expected) from error


def _is_of(kind: type, value: str | int | bool) -> bool:
    """Check a value whose conversion would give another: any text is true, and True is the number 1."""
    if kind is bool:
        return value in (True, False)
    return isinstance(value, str) if kind is str else not isinstance(value, bool)
