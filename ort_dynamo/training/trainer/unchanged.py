"""Undoes what a call of a model changes on its modules: attributes, and what lists, dicts and sets among them hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["unchanged"]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Have all modules of a model hold what they held, once this closes; tensors written in place stay written.

    A capture runs the model's Python with stand-ins for results. A model that keeps a result, such as a mask for the
    next call, would go on with memory that nobody has filled.
    """
    held: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        _note(vars(module), held)
    try:
        yield
    finally:
        for container, contents in held.values():
            container.clear()
            if isinstance(container, (dict, set)):
                container.update(contents)
            else:
                container.extend(contents)


def _note(value: Any, held: dict[int, tuple[Any, Any]]) -> None:
    """Copy what a container holds, and the containers in it."""
    if id(value) in held or not isinstance(value, (dict, list, set, deque, tuple)):
        return
    if not isinstance(value, tuple):
        held[id(value)] = value, value.copy()
    for one in value.values() if isinstance(value, dict) else value:
        _note(one, held)
