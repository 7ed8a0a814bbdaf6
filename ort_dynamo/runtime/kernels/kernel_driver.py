"""Loads cubins and launches their kernels through CUDA's driver, called from Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from ort_dynamo.runtime.kernels.fused_kernel import TRAILING_NULLS, KernelVariant

__all__ = ["Driver", "LaunchError", "LoadedKernel"]

_SHARED_WITHOUT_ASKING = 48 * 1024
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_POINTER_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuLibraryLoadData": (POINTER(c_void_p), c_char_p, c_void_p, c_void_p, c_uint, c_void_p, c_void_p, c_uint),
    "cuLibraryGetKernel": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuKernelSetAttribute": (c_int, c_int, c_void_p, c_int),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}


class LaunchError(Exception):
    """A kernel cannot be loaded or launched; the message has the reason."""


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel that the driver has loaded.

    Attributes:
        handle: a CUkernel, which serves all devices.
        num_warps: the warps per program.
        shared: the bytes of dynamic shared memory per program.
    """

    handle: int
    num_warps: int
    shared: int


class Driver:
    """CUDA's driver.

    Args:
        name: its library.

    Raises:
        LaunchError: the library cannot be loaded, or it lacks a function, or it does not work.
    """

    def __init__(self, name: str) -> None:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            raise LaunchError(str(error)) from error
        self._functions: dict[str, Any] = {}
        for function, parameters in _FUNCTIONS.items():
            found = getattr(library, function, None)
            if found is None:
                raise LaunchError(f"{name} has no {function}")
            found.argtypes = parameters
            self._functions[function] = found
        self._prepared: set[tuple[int, int]] = set()
        self._call("cuInit", 0)

    def load(self, variant: KernelVariant) -> LoadedKernel:
        """Load a kernel.

        Raises:
            LaunchError: the kernel cannot be loaded.
        """
        library, kernel = c_void_p(), c_void_p()
        self._call("cuLibraryLoadData", byref(library), variant.cubin, None, None, 0, None, None, 0)
        self._call("cuLibraryGetKernel", byref(kernel), library, variant.entry.encode())
        return LoadedKernel(kernel.value or 0, variant.num_warps, variant.shared)

    def need_context(self, ordinal: Callable[[], int | None], output: int) -> None:
        """Give this thread the primary context of the kernel's device, unless it has a context.

        A launch does not create one, unlike one by CUDA's runtime.

        Args:
            ordinal: gives the index of the device; if it gives None, the device is that of `output`.
            output: an address on the device.
        """
        context = c_void_p()
        self._call("cuCtxGetCurrent", byref(context))
        if context.value:
            return
        index, device = c_int(), c_int()
        said = ordinal()
        if said is None:
            self._call("cuPointerGetAttribute", byref(index), _POINTER_DEVICE_ORDINAL, output)
        self._call("cuDeviceGet", byref(device), index.value if said is None else said)
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def launch(
        self,
        kernel: LoadedKernel,
        programs: int,
        pointers: Sequence[int],
        symbols: Sequence[int],
        stream: int | None,
    ) -> None:
        """Launch a kernel on the current context.

        Raises:
            LaunchError: the kernel cannot be launched.
        """
        if kernel.shared > _SHARED_WITHOUT_ASKING:
            self._allow_shared(kernel)
        count = len(pointers) + len(symbols)
        words = (c_uint64 * (count + 1))(*pointers, *symbols)  # the last one is the null
        first = ctypes.addressof(words)
        places = [first + 8 * index for index in range(count)] + [first + 8 * count] * TRAILING_NULLS
        arguments = (c_void_p * len(places))(*places)
        grid, block = (programs, 1, 1), (32 * kernel.num_warps, 1, 1)
        self._call("cuLaunchKernel", kernel.handle, *grid, *block, kernel.shared, stream, arguments, None)

    def _allow_shared(self, kernel: LoadedKernel) -> None:
        device = c_int()
        self._call("cuCtxGetDevice", byref(device))
        place = (kernel.handle, device.value)
        if place not in self._prepared:
            self._call("cuKernelSetAttribute", _MAX_DYNAMIC_SHARED, kernel.shared, kernel.handle, device)
            self._prepared.add(place)

    def _call(self, function: str, *arguments: Any) -> None:
        error = self._functions[function](*arguments)
        if error:
            name = c_char_p()
            self._functions["cuGetErrorName"](error, byref(name))
            raise LaunchError(f"{function} gave error {error} ({(name.value or b'unknown').decode()})")
