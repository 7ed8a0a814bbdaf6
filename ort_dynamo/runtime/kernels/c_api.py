"""ONNX Runtime's C API by ctypes, as far as fused kernels need it.

Releases since 1.18 have these functions and fields at these offsets.
"""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, PYFUNCTYPE, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ort_dynamo.runtime.installed.importing import binding, onnxruntime
from ort_dynamo.runtime.kernels.fused_kernel import Unavailable

__all__ = ["API_VERSION", "FAIL", "Api", "CustomOp", "StatusError", "check", "options_address", "second_copy"]

API_VERSION = 18
FAIL = 1
"""ORT_FAIL of OrtErrorCode."""

_ADDRESS, _STATUS = c_void_p, c_void_p

# PYFUNCTYPE keeps Python's lock, which is faster; CFUNCTYPE gives it to others meanwhile. Making an output may wait for
# memory, and so for a thread that waits for Python's lock.
_FUNCTIONS: dict[str, tuple[int, Any]] = {
    "CreateStatus": (0, PYFUNCTYPE(_STATUS, c_int, c_char_p)),
    "GetErrorMessage": (2, PYFUNCTYPE(c_char_p, _ADDRESS)),
    "CreateCustomOpDomain": (26, PYFUNCTYPE(_STATUS, c_char_p, POINTER(c_void_p))),
    "CustomOpDomain_Add": (27, PYFUNCTYPE(_STATUS, _ADDRESS, _ADDRESS)),
    "AddCustomOpDomain": (28, PYFUNCTYPE(_STATUS, _ADDRESS, _ADDRESS)),
    "GetTensorMutableData": (51, PYFUNCTYPE(_STATUS, _ADDRESS, POINTER(c_void_p))),
    "GetDimensionsCount": (61, PYFUNCTYPE(_STATUS, _ADDRESS, POINTER(c_size_t))),
    "GetDimensions": (62, PYFUNCTYPE(_STATUS, _ADDRESS, POINTER(c_int64), c_size_t)),
    "GetTensorTypeAndShape": (65, PYFUNCTYPE(_STATUS, _ADDRESS, POINTER(c_void_p))),
    "KernelContext_GetInput": (90, PYFUNCTYPE(_STATUS, _ADDRESS, c_size_t, POINTER(c_void_p))),
    "KernelContext_GetOutput": (91, CFUNCTYPE(_STATUS, _ADDRESS, c_size_t, c_void_p, c_size_t, POINTER(c_void_p))),
    "ReleaseStatus": (93, PYFUNCTYPE(None, _ADDRESS)),
    "ReleaseTensorTypeAndShapeInfo": (99, PYFUNCTYPE(None, _ADDRESS)),
    "KernelContext_GetGPUComputeStream": (193, PYFUNCTYPE(_STATUS, _ADDRESS, POINTER(c_void_p))),
    "KernelContext_GetResource": (265, PYFUNCTYPE(_STATUS, _ADDRESS, c_int, c_int, POINTER(c_void_p))),
}


class StatusError(Exception):
    """A function of the C API gave an OrtStatus, whose address is the argument; whoever catches this owns it."""


class Api:
    """A table OrtApi: its functions, by their names.

    Args:
        address: the address of the table.
    """

    CreateStatus: Any
    GetErrorMessage: Any
    CreateCustomOpDomain: Any
    CustomOpDomain_Add: Any
    AddCustomOpDomain: Any
    GetTensorMutableData: Any
    GetDimensionsCount: Any
    GetDimensions: Any
    GetTensorTypeAndShape: Any
    KernelContext_GetInput: Any
    KernelContext_GetOutput: Any
    ReleaseStatus: Any
    ReleaseTensorTypeAndShapeInfo: Any
    KernelContext_GetGPUComputeStream: Any
    KernelContext_GetResource: Any

    def __init__(self, address: int) -> None:
        for name, (index, prototype) in _FUNCTIONS.items():
            setattr(self, name, prototype(c_void_p.from_address(address + 8 * index).value))

    def read(self, function: Any, *arguments: Any) -> int:
        """Call a function whose last parameter is an output address, and give that address, or 0.

        Raises:
            StatusError: the function failed.
        """
        found = c_void_p()
        check(function(*arguments, ctypes.byref(found)))
        return found.value or 0

    def shape(self, value: int) -> list[int]:
        """Return the dimensions of a tensor.

        Raises:
            StatusError: the value is no tensor.
        """
        information = c_void_p()
        check(self.GetTensorTypeAndShape(value, ctypes.byref(information)))
        try:
            rank = c_size_t()
            check(self.GetDimensionsCount(information, ctypes.byref(rank)))
            dimensions = (c_int64 * rank.value)()
            check(self.GetDimensions(information, dimensions, rank))
            return list(dimensions)
        finally:
            self.ReleaseTensorTypeAndShapeInfo(information)

    def message(self, status: int) -> str:
        """Return the message of a status, which is released."""
        text: bytes = self.GetErrorMessage(status)
        self.ReleaseStatus(status)
        return text.decode(errors="replace")


def check(status: int | None) -> None:
    """Raise StatusError unless it is null."""
    if status:
        raise StatusError(status)


class CustomOp(ctypes.Structure):
    """OrtCustomOp of version 18."""

    _fields_ = (
        ("version", c_uint32),
        ("CreateKernel", c_void_p),
        ("GetName", c_void_p),
        ("GetExecutionProviderType", c_void_p),
        ("GetInputType", c_void_p),
        ("GetInputTypeCount", c_void_p),
        ("GetOutputType", c_void_p),
        ("GetOutputTypeCount", c_void_p),
        ("KernelCompute", c_void_p),
        ("KernelDestroy", c_void_p),
        ("GetInputCharacteristic", c_void_p),
        ("GetOutputCharacteristic", c_void_p),
        ("GetInputMemoryType", c_void_p),
        ("variadic", c_void_p * 4),
        ("CreateKernelV2", c_void_p),
        ("KernelComputeV2", c_void_p),
        ("InferOutputShapeFn", c_void_p),
        ("versions", c_void_p * 2),
        ("in_place_and_alias", c_void_p * 4),
    )


def second_copy() -> Api | Unavailable:
    """Return the table of the library beside onnxruntime's Python module, which exports none itself.

    Both are of one build, so functions of the one can work on objects of the other.
    """
    version = onnxruntime().__version__
    path = Path(binding().__file__).with_name(f"libonnxruntime.so.{version}")
    if not path.is_file():
        return Unavailable(f"there is no {path.name} beside {Path(binding().__file__).name}")
    try:
        get_base = ctypes.CDLL(str(path)).OrtGetApiBase
    except (OSError, AttributeError) as error:
        return Unavailable(str(error))
    get_base.restype = c_void_p
    get_api, get_version = (c_uint64 * 2).from_address(get_base())
    if (said := CFUNCTYPE(c_char_p)(get_version)()) != version.encode():
        return Unavailable(f"{path.name} says that it is {said!r}")
    address = CFUNCTYPE(c_void_p, c_uint32)(get_api)(API_VERSION)
    return Api(address) if address else Unavailable(f"{path.name} has no C API {API_VERSION}")


_OBJECT_SIZE = 56
_CONSTRUCTED = 0b1111
"""Flags of a pybind11 object that owns one C++ object: owned, simple_layout, holder constructed, registered."""


def options_address(settings: Any) -> int | None:
    """Return the address of a SessionOptions' C++ object; None if the object has an unknown layout.

    pybind11 stores it after the object's reference count and type, and again in the pointer that owns it. The memory at
    that address must begin with the execution mode.
    """
    if not isinstance(settings, onnxruntime().SessionOptions) or type(settings).__basicsize__ != _OBJECT_SIZE:
        return None
    _, kind, address, owner, _, _, flags = (c_uint64 * (_OBJECT_SIZE // 8)).from_address(id(settings))
    if kind != id(type(settings)) or not address or address % 8 or owner != address:
        return None
    if flags & 0xFF != _CONSTRUCTED:
        return None
    modes, before = onnxruntime().ExecutionMode, settings.execution_mode
    try:
        for mode in (modes.ORT_PARALLEL, modes.ORT_SEQUENTIAL):
            settings.execution_mode = mode
            if c_int.from_address(address).value != int(mode):
                return None
    finally:
        settings.execution_mode = before
    return int(address)
