"""Containers of a program: what they hold, and how it is put back."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["content_of", "held", "is_container", "items_of", "put_back"]

_MUTABLE = (dict, set, list, deque)
_ALL = (*_MUTABLE, tuple, frozenset)


def is_container(value: Any) -> bool:
    """Check for a container that a program may change in place, of any subclass."""
    return issubclass(type(value), _MUTABLE)


def items_of(value: Any) -> Sequence[Any]:
    """Return the items of a container, or the values of a dict; nothing of any other value."""
    if not issubclass(type(value), _ALL):
        return ()
    return list(dict.values(value) if isinstance(value, dict) else _iterated(value))


def content_of(container: Any) -> list[Any]:
    """Return what a container holds, for `put_back`."""
    return list(dict.items(container) if isinstance(container, dict) else _iterated(container))


def put_back(container: Any, content: Sequence[Any]) -> None:
    """Make a container hold what it held, if it does not: another thread may look at it now."""
    if _is_same(content_of(container), content, pairs=isinstance(container, dict)):
        return
    kind: Any = next(one for one in (OrderedDict, *_MUTABLE) if isinstance(container, one))
    kind.clear(container)  # those of the base class: the update of a Counter adds
    (kind.update if issubclass(kind, (dict, set)) else kind.extend)(container, content)


def held(values: Iterable[Any], seen: set[int], most: int | None) -> Iterator[Any]:
    """Yield the tensors among some values, and the containers with all that is in them, each once.

    Args:
        values: the values.
        seen: identities of what has been seen before; this adds to them.
        most: containers of more items come without what is in them; None looks into all.
    """
    waiting = list(values)[::-1]
    while waiting:
        one = waiting.pop()
        is_tensor = issubclass(type(one), torch.Tensor)
        if id(one) in seen or not (is_tensor or issubclass(type(one), _ALL)):
            continue
        seen.add(id(one))
        if is_tensor or is_container(one):
            yield one
        if not is_tensor and (most is None or len(one) <= most):
            waiting += items_of(one)[::-1]


def _iterated(container: Any) -> Iterator[Any]:
    kind = next(one for one in _ALL if isinstance(container, one))
    found: Iterator[Any] = kind.__iter__(container)
    return found


def _is_same(now: Sequence[Any], before: Sequence[Any], *, pairs: bool) -> bool:
    if len(now) != len(before):
        return False
    if not pairs:
        return all(map(operator.is_, now, before))
    return all(key is known and one is other for (key, one), (known, other) in zip(now, before, strict=True))
