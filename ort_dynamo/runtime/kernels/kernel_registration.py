"""Finds the way to register fused kernels in this process: the C library, else callbacks."""

from __future__ import annotations

import threading
from pathlib import Path

from ort_dynamo.runtime.kernels.fused_kernel import Unavailable
from ort_dynamo.runtime.kernels.kernel_callbacks import KernelCallbacks
from ort_dynamo.runtime.kernels.kernel_library import KernelLibrary

__all__ = ["Registration", "find_registration", "registration"]

Registration = KernelLibrary | KernelCallbacks

_lock = threading.Lock()
_found: Registration | Unavailable | None = None


def registration(folder: Path | None) -> Registration | Unavailable:
    """Return the registration of fused kernels for this process, which the first call chooses.

    Args:
        folder: the folder of the C library. If it is None or cannot be used, it is a private folder of the process.
            Later calls ignore it.
    """
    global _found
    with _lock:
        if _found is None:
            _found = find_registration(folder)
        return _found


def find_registration(folder: Path | None) -> Registration | Unavailable:
    """Look for a way to register fused kernels: the C library if it can be built, else callbacks."""
    library = KernelLibrary.load(folder)
    if not isinstance(library, Unavailable):
        return library
    callbacks = KernelCallbacks.load()
    if not isinstance(callbacks, Unavailable):
        return callbacks
    return Unavailable(f"the library is not built ({library.reason}), and {callbacks.reason}")
