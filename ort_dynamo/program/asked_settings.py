"""Reads the settings with which a model is to be examined: its own if it is compiled, else the given ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ort_dynamo.errors import InvalidArgumentError
from ort_dynamo.torch_internals.tracing.frames import compile_settings

__all__ = ["BACKEND", "Asked", "asked_settings", "check_needs_none"]

BACKEND = "ort_dynamo.backend"
"""The module of the backend's function, which identifies our compiles in Dynamo's records."""


class Asked(NamedTuple):
    """Arguments of torch.compile for ort_train.

    Attributes:
        mode: the mode.
        options: the options.
        dynamic: torch.compile's `dynamic`.
        is_own: True if they are those of a compiled model.
    """

    mode: str | None
    options: Mapping[str, Any] | None
    dynamic: bool | None
    is_own: bool


def asked_settings(
    function: str,
    model: Any,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Asked:
    """Return the settings of a compiled model, or the given ones for a model that is not compiled.

    Args:
        function: the public function that is asked, for errors.
        model: the model or function.
        mode, options, dynamic: those that were given.

    Raises:
        InvalidArgumentError: the model cannot be called, or is compiled by another backend, or settings are given
            beside its own.
    """
    if not callable(model):
        raise InvalidArgumentError(function=function, name="model", value=model, expected="a module or a function")
    own = compile_settings(model)
    if own is None:
        return Asked(mode, options, dynamic, is_own=False)
    if own.home != BACKEND:
        expected = f"a model, or one compiled by ort_train; the backend of this one is {own.backend}"
        raise InvalidArgumentError(function=function, name="model", value=type(model), expected=expected)
    for name, value in {"mode": mode, "options": options, "dynamic": dynamic}.items():
        if value is not None:
            expected = "none for a compiled model, which has its own"
            raise InvalidArgumentError(function=function, name=name, value=value, expected=expected)
    return Asked(own.mode, own.options, own.dynamic, is_own=True)


def check_needs_none(function: str, model: Callable[..., Any]) -> None:
    """Check that a call without arguments fits a model.

    Args:
        function: the public function that was given a model and no arguments, for errors.
        model: the module or function, not compiled.

    Raises:
        InvalidArgumentError: the model takes arguments that have no default.
    """
    try:
        inspect.signature(model.forward if isinstance(model, nn.Module) else model).bind()
    except TypeError as error:
        expected = f"example inputs, as in {function}(model, batch), but the call has none: {error}"
        raise InvalidArgumentError(function=function, name="args", value=(), expected=expected) from None
    except ValueError:  # the callable has no signature; the call itself tells
        return
