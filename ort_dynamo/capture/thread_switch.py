"""Switches on kernels of ours in the thread that traces for this backend, and in no other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ThreadSwitch"]


class ThreadSwitch(threading.local):
    """A switch that each thread has for itself.

    Attributes:
        is_on: whether this thread is inside `on()`.
    """

    is_on: bool = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Switch on while the context is open; it may be open already."""
        before, self.is_on = self.is_on, True
        try:
            yield
        finally:
            self.is_on = before
