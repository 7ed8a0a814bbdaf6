"""Reads the attributes of ONNX Runtime's SessionOptions that a program sets."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from ort_dynamo.errors import InvalidOptionError

__all__ = ["attribute_names", "is_mapping", "plain_attributes"]


def attribute_names(options: Any) -> list[str]:
    """Give the names of the attributes of a SessionOptions that can be set; its methods are none."""
    return [name for name in dir(options) if not name.startswith("_") and not callable(getattr(options, name))]


def is_mapping(given: Any) -> bool:
    """Check whether a value is a dict, or the pairs of one."""
    pairs = isinstance(given, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in given)
    return pairs or isinstance(given, Mapping)


def plain_attributes(given: Any) -> dict[str, str | int | bool]:
    """Give the attributes of a SessionOptions that differ from a new one's; a dict of attributes is unchanged."""
    if given is None:
        return {}
    if is_mapping(given):
        pairs = dict(given)
    elif type(given).__name__ != "SessionOptions":
        raise InvalidOptionError(
            name="session_options", value=given, expected="an onnxruntime.SessionOptions or a dict"
        )
    else:
        fresh = type(given)()
        names = attribute_names(given)
        pairs = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(fresh, name)}
    return {str(name): _plain(str(name), value) for name, value in pairs.items()}


def _plain(name: str, value: Any) -> str | int | bool:
    """Give the value of an attribute; an enumeration becomes its integer, which can be set again."""
    if isinstance(value, (str, int)):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    try:
        return operator.index(value)  # which cuts no fraction off, as int() does
    except TypeError as error:
        expected = "a text, a number, a bool or an enumeration of ONNX Runtime"
        raise InvalidOptionError(name=f"session_options[{name!r}]", value=value, expected=expected) from error
