"""The memory of CUDA sessions: torch's caching allocator, as an allocator of ONNX Runtime's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection
from functools import partial
from typing import Any

import torch

from ort_dynamo.runtime.installed.importing import onnxruntime

__all__ = ["TORCH_MEMORY", "TorchMemory"]

_ALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_OF_AN_ARENA = frozenset(["arena_extend_strategy", "gpu_external_alloc", "gpu_external_free", "gpu_mem_limit"])
"""Provider options that say something of memory, which only a session with an arena of its own heeds."""


class TorchMemory:
    """Allocator that gives sessions memory of torch's pool, and returns it there after each run.

    So `torch.cuda.memory_allocated` and its kin count it, `torch.cuda.empty_cache` frees it, and the next graph takes
    the memory that one graph leaves. The provider's own options for it (gpu_external_alloc and gpu_external_free)
    cannot be used: it refuses them beside a stream that is given. An allocator of the process that is made with the
    same options can, by sessions whose setting "session.use_env_allocators" is "1". torch has no C function of the
    wanted kind, so ONNX Runtime calls Python here: for a run that it has seen before, once for all that is planned, and
    once for each kernel's workspace.
    """

    def __init__(self) -> None:
        self._registered: dict[int, tuple[Any, Any]] = {}
        self._raised = threading.local()
        self._lock = threading.Lock()

    def serves(self, provider_options: Collection[str]) -> bool:
        """Check whether a session takes its memory here: not if its options ask for an arena of its own."""
        return hasattr(onnxruntime(), "create_and_register_allocator_v2") and _OF_AN_ARENA.isdisjoint(provider_options)

    def register(self, provider: str, device: torch.device) -> None:
        """Make the allocator of a device, unless it is there.

        Raises:
            RuntimeError: the provider does not load, in ONNX Runtime's words.
        """
        index = device.index or 0
        with self._lock:
            if index in self._registered:
                return
            ort = onnxruntime()
            place = ort.OrtMemoryInfo("Cuda", ort.OrtAllocatorType.ORT_DEVICE_ALLOCATOR, index, ort.OrtMemType.DEFAULT)
            calls = _ALLOC(partial(self._alloc, index)), _FREE(self._free)
            alloc, free = (str(ctypes.cast(call, ctypes.c_void_p).value) for call in calls)
            options = {"gpu_external_alloc": alloc, "gpu_external_free": free}
            try:
                ort.create_and_register_allocator_v2(provider, place, options, ort.OrtArenaCfg({"max_mem": 0}))
            except RuntimeError as error:
                if "already been registered" not in str(error):
                    raise
                # The program has registered one for its own sessions, and it serves as well.
            self._registered[index] = calls  # ONNX Runtime has their addresses for good

    def _alloc(self, index: int, nbytes: int) -> int | None:
        # No exception goes through ONNX Runtime, here or in `_free`: the caller of the session asks for it.
        try:
            return torch.cuda.caching_allocator_alloc(nbytes, index)
        except Exception as error:
            self._raised.error = error
            return None

    def _free(self, address: int | None) -> None:
        if not address:  # memory of a result without elements; torch takes no null pointer
            return
        try:
            torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._raised.error = error

    def raised(self) -> Exception | None:
        """Give the error that torch raised in this thread when asked for memory, since the last call of this method."""
        error: Exception | None = self._raised.__dict__.pop("error", None)
        return error


TORCH_MEMORY = TorchMemory()
"""The process's own."""
