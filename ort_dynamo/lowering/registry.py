"""ATen overload -> lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from torch._ops import OpOverload

from ort_dynamo.errors import DuplicateLoweringError

__all__ = ["Lowering", "find_lowering", "lowering", "register", "registered"]

Lowering = Callable[..., Any]
"""lowering(ctx, *args, **kwargs) -> ir.Value, or a tuple of ir.Value | None for several outputs.

The arguments are the node's own, with every tensor argument replaced by its ir.Value and every symbolic number by
its torch.SymInt / SymFloat. An output nobody reads may be None.
"""

_F = TypeVar("_F", bound=Lowering)
_REGISTRY: dict[OpOverload, Lowering] = {}


def register(overload: OpOverload, function: Lowering) -> None:
    """Make `function` the lowering of `overload`.

    Raises:
        DuplicateLoweringError: the overload has one already.
    """
    if overload in _REGISTRY:
        raise DuplicateLoweringError(overload=overload, first=_name(_REGISTRY[overload]), second=_name(function))
    _REGISTRY[overload] = function


def lowering(*overloads: OpOverload) -> Callable[[_F], _F]:
    """Decorator form of `register`; returns the function unchanged."""

    def decorate(function: _F) -> _F:
        for overload in overloads:
            register(overload, function)
        return function

    return decorate


def find_lowering(overload: OpOverload) -> Lowering | None:
    """Our own lowering of exactly this overload, or None."""
    _load_families()
    return _REGISTRY.get(overload)


def registered() -> Iterable[OpOverload]:
    """Every overload with a lowering of our own."""
    _load_families()
    return tuple(_REGISTRY)


@functools.cache
def _load_families() -> None:
    from ort_dynamo.lowering import ops

    for module in iter_modules(ops.__path__):
        import_module(f"{ops.__name__}.{module.name}")


def _name(function: Lowering) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return f"{inner.__module__}.{inner.__qualname__}"
