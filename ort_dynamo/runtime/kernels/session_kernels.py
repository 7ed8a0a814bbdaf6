"""The fused kernels of a session: whether this process can have any, and the code of each."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.graph.fused_op import FusedOp
from ort_dynamo.runtime.kernels.fused_kernel import FusedKernel, Unavailable
from ort_dynamo.runtime.kernels.kernel_callbacks import KernelCallbacks
from ort_dynamo.runtime.kernels.kernel_compiler import KernelStore, compile_kernels, triton_version
from ort_dynamo.runtime.kernels.kernel_registration import registration
from ort_dynamo.runtime.kernels.library_build import compilers
from ort_dynamo.targets.target import Target

__all__ = ["can_fuse", "register_kernels", "session_kernels"]

_log = logging.getLogger(__name__)  # TORCH_LOGS=ort_dynamo shows it

_KERNELS: dict[tuple[FusedOp, tuple[int, int]], FusedKernel | str] = {}
"""Operator and capability of the device -> its kernel, or why there is none. Registered kernels stay, too."""

_lock = threading.Lock()


@lru_cache(maxsize=1)
def can_fuse() -> bool:
    """Check whether fused kernels can be compiled here, and registered with sessions: by C, or by callbacks."""
    if triton_version() is None:
        return False
    has_compiler = any(shutil.which(command[0]) for command in compilers())
    return has_compiler or isinstance(KernelCallbacks.load(), KernelCallbacks)


def session_kernels(
    built: BuiltGraph, target: Target, device: torch.device, store: KernelStore | None = None
) -> tuple[FusedKernel, ...]:
    """Compile new kernels of a graph, or read them from the store.

    A kernel that fails to compile is left out, with a warning; the session then runs the original nodes.

    Args:
        built: the graph.
        target: the target that it was lowered for.
        device: the device of the session's tensors.
        store: the store of compiled kernels.
    """
    if not built.kernels:
        return ()
    capability = torch.cuda.get_device_capability(device)
    with _lock:
        new = [op for op in built.kernels if (op, capability) not in _KERNELS]
        compiled = compile_kernels(new, capability, store)
        for op in new:
            found = compiled[op.name]
            if isinstance(found, str):
                _log.warning(
                    "ort_train: the fused kernel %s is not used: %s. ONNX Runtime runs its operators.",
                    op.name,
                    found,
                )
                _KERNELS[op, capability] = found
                continue
            _KERNELS[op, capability] = FusedKernel(op, found, target.provider)
        all_found = [_KERNELS[op, capability] for op in built.kernels]
    return tuple(one for one in all_found if isinstance(one, FusedKernel))


def register_kernels(settings: Any, kernels: Sequence[FusedKernel], store: KernelStore | None = None) -> None:
    """Register kernels for a session that is opened with these settings.

    If that fails, the session runs the original nodes, and a warning is logged.

    Args:
        settings: an onnxruntime SessionOptions.
        kernels: the kernels, with different names.
        store: the store whose folder has the C library.
    """
    if not kernels:
        return
    way = registration(None if store is None else store.folder)
    if isinstance(way, Unavailable):
        _log.warning("ort_train: fused kernels are off: %s. ONNX Runtime's own kernels run instead.", way.reason)
    else:
        way.register(settings, kernels)
