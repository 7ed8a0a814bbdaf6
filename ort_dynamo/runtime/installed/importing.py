"""The one place that imports onnxruntime."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = ["binding", "build_info", "onnxruntime", "restore_torch"]


@functools.cache
def onnxruntime() -> Any:
    """Return the module `onnxruntime`, imported without its effects on torch."""
    import onnxruntime as module

    restore_torch()
    return module


def restore_torch() -> None:
    """Restore torch's functions, if the import of onnxruntime has replaced them.

    The training build imports its ORTModule. That fails on current torch, but only after it has replaced the functions
    below by its own. Dynamo does not know these, and compiled models that call them break.
    """
    _restore("manual_seed", torch.manual_seed, torch.random.manual_seed)
    _restore("manual_seed", torch.cuda.manual_seed, torch.cuda.random.manual_seed)
    checkpoint: Any = torch.utils.checkpoint.checkpoint
    while _is_replacement(checkpoint):  # twice: a failed import is tried again
        checkpoint = inspect.getclosurevars(checkpoint).nonlocals["original_checkpoint"]
    _restore("checkpoint", torch.utils.checkpoint.checkpoint, checkpoint)


def _is_replacement(function: Any) -> bool:
    return str(function.__module__).startswith("onnxruntime.")


def _restore(name: str, function: Any, own: Any) -> None:
    """Replace `function` by `own` in every module that has it, also in those that imported it."""
    if _is_replacement(function):
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is function:
                setattr(module, name, own)


def binding() -> Any:
    """onnxruntime's compiled module, which has the objects that the Python classes wrap."""
    onnxruntime()
    from onnxruntime.capi import onnxruntime_pybind11_state

    return onnxruntime_pybind11_state


def build_info() -> Any:
    """onnxruntime's module of facts about the build: package_name, __version__ and, of CUDA's, cuda_version."""
    onnxruntime()
    from onnxruntime.capi import build_and_package_info

    return build_and_package_info
