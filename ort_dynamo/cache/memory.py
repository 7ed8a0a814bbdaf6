"""Compiled graphs of this process, by graph key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["MemoryCache"]

_T = TypeVar("_T")


class MemoryCache(Generic[_T]):
    """key -> value, made once even when several threads ask at the same time.

    Attributes:
        hits, misses: how often a key was found, and how often its value was made.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _T] = {}
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0

    def get_or_make(self, key: Hashable | None, make: Callable[[], _T]) -> _T:
        """The value of `key`, from `make` if it is new. With key None the value is made and not kept."""
        if key is None:
            return make()
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:  # others that want the same key wait; other keys do not
            if key in self._entries:
                self.hits += 1
                return self._entries[key]
            self.misses += 1
            value = self._entries[key] = make()
            return value

    def clear(self) -> None:
        """Forget all entries; callers that hold a value keep it."""
        with self._lock:
            self._entries.clear()
            self._making.clear()

    def __len__(self) -> int:
        return len(self._entries)
