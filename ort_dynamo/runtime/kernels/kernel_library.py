"""Registers fused kernels with sessions through the C library, which launches them without Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ort_dynamo.graph.fused_op import DOMAIN, Size
from ort_dynamo.runtime.kernels.fused_kernel import (
    DRIVER,
    CompiledKernel,
    FusedKernel,
    HostCode,
    KernelVariant,
    Unavailable,
)
from ort_dynamo.runtime.kernels.library_build import built_library

__all__ = ["KernelLibrary"]


class _Cubin(ctypes.Structure):
    """`Cubin` of fused.c."""

    _fields_ = (
        ("image", ctypes.c_char_p),
        ("nbytes", ctypes.c_size_t),
        ("entry", ctypes.c_char_p),
        ("num_warps", ctypes.c_int64),
        ("shared", ctypes.c_int64),
    )


class _Description(ctypes.Structure):
    """`Description` of fused.c."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("provider", ctypes.c_char_p),
        ("driver", ctypes.c_char_p),
        ("host", ctypes.c_void_p),
        ("aligned", _Cubin),
        ("unaligned", _Cubin),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("symbols", ctypes.c_int64),
        ("per_program", ctypes.c_int64),
        ("numbers", ctypes.POINTER(ctypes.c_int64)),
        ("number_count", ctypes.c_size_t),
    )


class KernelLibrary:
    """The C library, loaded.

    Kernels are never freed: sessions hold their addresses, and equal kernels share one.

    Args:
        path: the path of its file. ONNX Runtime opens the same path, and so gets the same image.
        library: the loaded library.
        driver: the library of CUDA's driver, for cubins.
    """

    how = "library"

    def __init__(self, path: Path, library: ctypes.CDLL, driver: str = DRIVER) -> None:
        self.path = path
        self._driver = driver
        self._library = library
        library.fused_create.restype = ctypes.c_void_p
        library.fused_create.argtypes = (ctypes.POINTER(_Description),)
        library.fused_next.argtypes = (ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
        library.fused_next.restype = None
        self._made: dict[FusedKernel, int] = {}
        self._lock = threading.Lock()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # for good: sessions have addresses in the library

    @classmethod
    def load(cls, folder: Path | None, driver: str = DRIVER) -> KernelLibrary | Unavailable:
        """Build the library, or find it in `folder`; see `built_library`."""
        found = built_library(folder)
        return found if isinstance(found, Unavailable) else cls(*found, driver)

    def register(self, settings: Any, kernels: Sequence[FusedKernel]) -> None:
        """Register kernels for sessions that are opened with these settings.

        Args:
            settings: an onnxruntime SessionOptions that has no fused kernels yet.
            kernels: the kernels, with different names.

        Raises:
            RuntimeError: ONNX Runtime refuses them, or it has loaded another file than this library.
        """
        with self._lock:
            ops = (ctypes.c_void_p * len(kernels))(*map(self._address, kernels))
        domain = DOMAIN.encode()  # the library keeps the addresses of both until they are registered
        self._library.fused_next(domain, ops, len(kernels))
        try:
            settings.register_custom_ops_library(str(self.path))
            if self._library.fused_is_waiting():
                raise RuntimeError(f"ONNX Runtime did not register the fused kernels of {self.path}")
        finally:
            self._library.fused_next(None, None, 0)

    def _address(self, kernel: FusedKernel) -> int:
        if kernel not in self._made:
            description = self._description(kernel)
            address = self._library.fused_create(ctypes.byref(description))  # which copies it
            if not address:
                raise MemoryError(kernel.op.name)
            self._made[kernel] = address
        return self._made[kernel]

    def _description(self, kernel: FusedKernel) -> _Description:
        op, code = kernel.op, kernel.code
        numbers = [*op.inputs, *(output.dtype for output in op.outputs)]
        numbers += [number for symbol in op.symbols for number in symbol]
        numbers += _numbers(op.count)
        for output in op.outputs:
            numbers.append(len(output.shape))
            numbers += [number for size in output.shape for number in _numbers(size)]
        return _Description(
            name=op.name.encode(),
            provider=kernel.provider and kernel.provider.encode(),
            driver=self._driver.encode(),
            host=code.address if isinstance(code, HostCode) else None,
            aligned=_cubin(code.aligned) if isinstance(code, CompiledKernel) else _Cubin(),
            unaligned=_cubin(code.unaligned) if isinstance(code, CompiledKernel) else _Cubin(),
            inputs=len(op.inputs),
            outputs=len(op.outputs),
            symbols=len(op.symbols),
            per_program=op.per_program,
            numbers=(ctypes.c_int64 * len(numbers))(*numbers),
            number_count=len(numbers),
        )


def _cubin(variant: KernelVariant) -> _Cubin:
    return _Cubin(variant.cubin, len(variant.cubin), variant.entry.encode(), variant.num_warps, variant.shared)


def _numbers(size: Size) -> list[int]:
    return [size.factor, len(size.symbols), *size.symbols]
