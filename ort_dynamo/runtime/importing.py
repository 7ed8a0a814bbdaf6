"""The one place that imports onnxruntime."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = ["binding", "onnxruntime"]


@functools.cache
def onnxruntime() -> Any:
    """The module `onnxruntime`, imported without its effects on torch.

    The training build imports its ORTModule, which fails on today's torch, but not before it has replaced the
    functions below by its own. Dynamo then no longer knows `checkpoint` and `manual_seed`: compiled models that
    call them break.
    """
    owners: tuple[tuple[Any, str], ...] = (
        (torch, "manual_seed"),
        (torch.cuda, "manual_seed"),
        (torch.utils.checkpoint, "checkpoint"),
    )
    own = [getattr(owner, name) for owner, name in owners]
    try:
        import onnxruntime as module
    finally:
        for (owner, name), function in zip(owners, own, strict=True):
            setattr(owner, name, function)
    return module


def binding() -> Any:
    """onnxruntime's compiled module, which has what the Python classes wrap."""
    onnxruntime()
    from onnxruntime.capi import onnxruntime_pybind11_state

    return onnxruntime_pybind11_state
