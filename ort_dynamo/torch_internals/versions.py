"""The tested versions of torch, and a warning about others."""

from __future__ import annotations

import functools
import logging

import torch

from ort_dynamo.torch_internals.release import say_if_newer

__all__ = ["TESTED", "say_if_untested"]

TESTED = ("2.11", "2.15")
"""The oldest and the newest release of torch that the tests passed on."""

_log = logging.getLogger("ort_dynamo")  # TORCH_LOGS=ort_dynamo shows it


@functools.cache
def say_if_untested() -> None:
    """Log, once a process, that the installed torch is newer than any tested; it is never refused for its number."""
    say_if_newer(_log, "torch", torch.__version__, TESTED[1])
