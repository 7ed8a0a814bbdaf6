"""The autograd engine: what runs where a backward ends."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd import Variable

__all__ = ["after_backward"]


def after_backward(function: Callable[[], None]) -> None:
    """Have a function called where the running backward ends; to be called inside one, in a hook."""
    # What DDP and FSDP use; torch has no public name for it.
    Variable._execution_engine.queue_callback(function)
