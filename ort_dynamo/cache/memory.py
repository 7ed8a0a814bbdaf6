"""Compiled graphs of this process, by graph key.

The cache evicts the least recently used entries if it has too many entries or too many bytes. An evicted graph stays
alive while a compiled callable uses it; only a later compile of the same graph builds it again. Sessions have threads
and buffers beside the model, so the number of entries is limited, too. The limit of 256 is Dynamo's limit of recompiles
of one function (`accumulated_recompile_limit`), and more than the graphs of the largest model tried. Models hold no
parameters: 1 GiB is enough for some ten thousand, but few of those with a large constant.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["MAX_BYTES", "MAX_ENTRIES", "MemoryCache"]

MAX_ENTRIES = 256
MAX_BYTES = 1 << 30

_T = TypeVar("_T")


class MemoryCache(Generic[_T]):
    """key -> value, made once even when several threads ask at the same time.

    Attributes:
        hits, misses: how often a key was found, and how often its value was made.
        nbytes: the sum of the sizes of the held values.
    """

    def __init__(
        self,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        size: Callable[[_T], int] = lambda value: 0,
        keep: Callable[[_T], bool] = lambda value: True,
    ) -> None:
        """Make an empty cache.

        Args:
            max_entries, max_bytes: bounds on the held values. A value larger than `max_bytes` is not held at all.
            size: bytes of a value.
            keep: whether a value may serve other callers with its key; otherwise only the caller that built it gets it.
        """
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._size = size
        self._keep = keep
        self._entries: OrderedDict[Hashable, tuple[_T, int]] = OrderedDict()  # least recently used first
        self._making: dict[Hashable, threading.Event] = {}  # set when the value is made, or was not
        self._lock = threading.Lock()
        self.hits: int = 0
        self.misses: int = 0
        self.nbytes: int = 0
        if hasattr(os, "register_at_fork"):  # not on Windows
            this = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _forget_other_threads(this()))

    def get_or_build(self, key: Hashable | None, make: Callable[[], _T]) -> _T:
        """Return the value of `key`, from `make` if it is new. With key None the value is made and not stored.

        An error that `make` raises reaches its caller alone: others that wait for the same key try themselves.
        """
        if key is None:
            return make()
        while True:
            own = threading.Event()
            try:
                with self._lock:
                    if key in self._entries:
                        self.hits += 1
                        self._entries.move_to_end(key)
                        return self._entries[key][0]
                    making = self._making.setdefault(key, own)
                    self.misses += making is own
                if making is own:
                    value = make()
                    nbytes = self._size(value) if self._keep(value) else None
                    with self._lock:
                        if nbytes is not None and self._making.get(key) is own:  # not cleared since
                            self._add(key, value, nbytes)
                    return value
            finally:
                # An interrupt can come anywhere, here as well; without the second call others would wait for ever.
                try:
                    self._release(key, own)
                finally:
                    self._release(key, own)
            making.wait()  # other keys do not wait

    def clear(self) -> None:
        """Forget all entries, and those that are being made right now; callers that hold a value keep it."""
        with self._lock:
            self._entries.clear()
            self._making.clear()  # those that wait for one of these make their own
            self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def _release(self, key: Hashable, own: threading.Event) -> None:
        """Let others make the value of a key, if `own` is the event for which they wait; a second call does nothing."""
        with self._lock:
            if self._making.get(key) is own:
                del self._making[key]
        own.set()

    def _add(self, key: Hashable, value: _T, nbytes: int) -> None:
        if nbytes > self._max_bytes:
            return
        self._entries[key] = value, nbytes
        self.nbytes += nbytes
        while len(self._entries) > self._max_entries or self.nbytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.nbytes -= freed

    def _forget_other_threads(self) -> None:
        # A fork copies the calling thread only: another may have been making a value, or half-way through a change.
        if self._lock.locked():
            self._entries.clear()
            self.nbytes = 0
        self._lock = threading.Lock()
        self._making = {}


def _forget_other_threads(cache: MemoryCache[_T] | None) -> None:
    if cache is not None:
        cache._forget_other_threads()
