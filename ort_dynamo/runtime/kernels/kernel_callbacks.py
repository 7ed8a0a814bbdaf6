"""Registers fused kernels with sessions where there is no C compiler: ONNX Runtime calls Python to launch them.

A launch takes some 10 µs more than with the C library. No exception goes through ONNX Runtime: it becomes a status.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, byref, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

from ort_dynamo.graph.fused_op import DOMAIN, ITSELF
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.kernels.c_api import (
    API_VERSION,
    FAIL,
    Api,
    CustomOp,
    StatusError,
    check,
    options_address,
    second_copy,
)
from ort_dynamo.runtime.kernels.fused_kernel import DRIVER, CompiledKernel, FusedKernel, HostCode, Unavailable
from ort_dynamo.runtime.kernels.kernel_driver import Driver, LaunchError, LoadedKernel

__all__ = ["KernelCallbacks"]

_TEXT = CFUNCTYPE(c_void_p, c_void_p)
_COUNT = CFUNCTYPE(c_size_t, c_void_p)
_NUMBER = CFUNCTYPE(c_int, c_void_p, c_size_t)
_CREATE = CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)
_COMPUTE = CFUNCTYPE(c_void_p, c_void_p, c_void_p)
_HOST = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int64)

_STATE = c_uint64 * 2
"""A kernel of a session: the addresses of its operator and of the API."""

_RESOURCE_VERSION, _DEVICE_ID = 1, 10004
_MOST_PROGRAMS = 2**31 - 1
_DEFAULT_MEMORY, _HOST_MEMORY = 0, -2


class _Op:
    """An operator that ONNX Runtime knows by the address of `structure`; it is never freed."""

    def __init__(self, kernel: FusedKernel, structure: CustomOp) -> None:
        self.kernel = kernel
        self.structure = structure
        self.name = ctypes.create_string_buffer(kernel.op.name.encode())
        self.provider = ctypes.create_string_buffer(kernel.provider.encode()) if kernel.provider else None
        self.outputs = tuple(output.dtype for output in kernel.op.outputs)
        self.aligned: LoadedKernel | None = None
        self.unaligned: LoadedKernel | None = None
        self.driver: Driver | None = None
        self.numbers = kernel.op.numbers
        self.measured = sorted({index for index, axis in kernel.op.symbols if axis != ITSELF})
        self.sizes = functools.lru_cache(maxsize=64)(self._sizes)

    def _sizes(self, symbols: tuple[int, ...]) -> tuple[int, list[Any]]:
        """Give the number of programs, and the dimensions of each output."""
        op = self.kernel.op
        shapes = [[size.value(symbols) for size in output.shape] for output in op.outputs]
        return op.programs(symbols), [(c_int64 * len(shape))(*shape) for shape in shapes]


class KernelCallbacks:
    """Callbacks by ctypes, instead of the C library.

    They and the kernels are never freed: sessions hold their addresses, and equal kernels share one.

    Args:
        api: the API with the functions that register operators.
        driver: the library of CUDA's driver, for cubins.
    """

    how = "callbacks"

    def __init__(self, api: Api, driver: str = DRIVER) -> None:
        self._api = api
        self._driver_name = driver
        self._driver: Driver | None = None
        self._ops: dict[int, _Op] = {}  # by the addresses of their structures
        self._made: dict[FusedKernel, int] = {}
        self._apis: dict[int, Api] = {}
        self._lock = threading.Lock()
        libc = ctypes.CDLL(None)
        self._malloc = libc.malloc
        self._malloc.restype, self._malloc.argtypes = c_void_p, (c_size_t,)
        self._free = ctypes.cast(libc.free, c_void_p).value  # frees a kernel, without Python, which may be gone by then
        ops = self._ops
        self._callbacks = {
            "GetName": _TEXT(lambda op: ctypes.addressof(ops[op].name)),
            "GetExecutionProviderType": _TEXT(lambda op: _address_of(ops[op].provider)),
            "GetInputType": _NUMBER(lambda op, index: ops[op].kernel.op.inputs[index]),
            "GetInputTypeCount": _COUNT(lambda op: len(ops[op].kernel.op.inputs)),
            "GetOutputType": _NUMBER(lambda op, index: ops[op].outputs[index]),
            "GetOutputTypeCount": _COUNT(lambda op: len(ops[op].outputs)),
            "GetInputCharacteristic": _NUMBER(lambda op, index: 0),  # required
            "GetOutputCharacteristic": _NUMBER(lambda op, index: 0),
            "GetInputMemoryType": _NUMBER(
                lambda op, index: _HOST_MEMORY if index in ops[op].numbers else _DEFAULT_MEMORY
            ),
            "CreateKernelV2": _CREATE(self._create),
            "KernelComputeV2": _COMPUTE(self._compute),
        }
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # for good: sessions have addresses of its members

    @classmethod
    def load(cls, driver: str = DRIVER) -> KernelCallbacks | Unavailable:
        """Find the functions that register the callbacks."""
        api = second_copy()
        if isinstance(api, Unavailable):
            return api
        if options_address(onnxruntime().SessionOptions()) is None:
            return Unavailable("the memory layout of SessionOptions is unknown")
        return cls(api, driver)

    def register(self, settings: Any, kernels: Sequence[FusedKernel]) -> None:
        """Register kernels for sessions that are opened with these settings.

        Args:
            settings: an onnxruntime SessionOptions that has no fused kernels yet.
            kernels: the kernels, with different names.

        Raises:
            RuntimeError: ONNX Runtime refuses them.
        """
        options = options_address(settings)
        if options is None:
            raise RuntimeError("the memory layout of SessionOptions is unknown")
        api = self._api
        with self._lock:
            addresses = [self._address(kernel) for kernel in kernels]
        try:
            domain = api.read(api.CreateCustomOpDomain, DOMAIN.encode())
            for address in addresses:
                check(api.CustomOpDomain_Add(domain, address))
            check(api.AddCustomOpDomain(options, domain))
        except StatusError as error:
            raise RuntimeError(api.message(error.args[0])) from error

    def _address(self, kernel: FusedKernel) -> int:
        if kernel not in self._made:
            addresses = {name: ctypes.cast(call, c_void_p).value for name, call in self._callbacks.items()}
            # ONNX Runtime wants the functions without a status to be there, and does not call them.
            addresses |= {"CreateKernel": self._free, "KernelCompute": self._free, "KernelDestroy": self._free}
            structure = CustomOp(version=API_VERSION, **addresses)
            address = ctypes.addressof(structure)
            self._ops[address] = _Op(kernel, structure)
            self._made[kernel] = address
        return self._made[kernel]

    def _create(self, address: int, api_address: int, _info: int, created: int) -> int | None:
        with self._lock:
            if api_address not in self._apis:
                self._apis[api_address] = Api(api_address)
        op, api = self._ops[address], self._apis[api_address]

        def create() -> None:
            if isinstance(op.kernel.code, CompiledKernel):
                with self._lock:
                    self._load(op, op.kernel.code)
            state = self._malloc(ctypes.sizeof(_STATE))
            if not state:
                raise MemoryError
            _STATE.from_address(state)[:] = [address, api_address]
            c_void_p.from_address(created).value = state

        return _status(api, op, create)

    def _load(self, op: _Op, code: CompiledKernel) -> None:
        if op.driver is not None:
            return
        self._driver = self._driver or Driver(self._driver_name)
        op.aligned, op.unaligned = self._driver.load(code.aligned), self._driver.load(code.unaligned)
        op.driver = self._driver

    def _compute(self, state: int, context: int) -> int | None:
        address, api_address = _STATE.from_address(state)
        op, api = self._ops[address], self._apis[api_address]
        return _status(api, op, lambda: _run(api, op, context))


def _run(api: Api, op: _Op, context: int) -> None:
    what = op.kernel.op
    found = c_void_p()
    where = byref(found)
    values: list[Any] = []
    pointers: list[int] = []
    for index in range(len(what.inputs)):
        check(api.KernelContext_GetInput(context, index, where))
        values.append(found.value)
        check(api.GetTensorMutableData(found, where))
        pointers.append(found.value or 0)
    shapes = {index: api.shape(values[index]) for index in op.measured}
    if any(not pointers[index] for index in op.numbers):
        raise LaunchError("a number is empty")
    for index, axis in what.symbols:
        if axis != ITSELF and axis >= len(shapes[index]):
            raise LaunchError(f"input {index} has {len(shapes[index])} dimensions")
    symbols = tuple(
        c_int64.from_address(pointers[index]).value if axis == ITSELF else shapes[index][axis]
        for index, axis in what.symbols
    )
    for index in op.numbers:
        pointers[index] = 0  # kernels cannot read it
    programs, outputs = op.sizes(symbols)
    for index, dimensions in enumerate(outputs):
        check(api.KernelContext_GetOutput(context, index, dimensions, len(dimensions), where))
        check(api.GetTensorMutableData(found, where))
        pointers.append(found.value or 0)
    if programs == 0:
        return
    code = op.kernel.code
    if isinstance(code, HostCode):
        given = (c_void_p * len(pointers))(*pointers), (c_int64 * (len(symbols) or 1))(*symbols)
        if error := _HOST(code.address)(*given, programs):
            raise LaunchError(f"the host function gave error {error}")
    else:
        _launch(api, op, context, pointers, symbols, programs)


def _launch(api: Api, op: _Op, context: int, pointers: Sequence[int], symbols: Sequence[int], programs: int) -> None:
    driver, what = op.driver, op.kernel.op
    kernel = op.unaligned if any(pointer & 15 for pointer in pointers) else op.aligned
    assert driver is not None
    assert kernel is not None
    if programs > _MOST_PROGRAMS:
        raise LaunchError(f"{programs} programs are too many")

    def ordinal() -> int | None:
        try:
            return api.read(api.KernelContext_GetResource, context, _RESOURCE_VERSION, _DEVICE_ID)
        except StatusError as error:  # some releases report device 0 as missing
            api.ReleaseStatus(error.args[0])
            return None

    driver.need_context(ordinal, pointers[len(what.inputs)])
    stream = api.read(api.KernelContext_GetGPUComputeStream, context)
    driver.launch(kernel, programs, pointers, symbols, stream)


def _status(api: Api, op: _Op, call: Callable[[], None]) -> int | None:
    """Return the address of a status with the reason of a failed call, or null."""
    try:
        call()
        return None
    except StatusError as error:
        return int(error.args[0])
    except LaunchError as error:
        reason = str(error).encode()
    except BaseException as error:
        # ONNX Runtime may cut the text anywhere, so it is ASCII.
        reason = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace")
    status: int = api.CreateStatus(FAIL, b"The fused kernel %s failed: %s" % (op.kernel.op.name.encode(), reason))
    return status


def _address_of(buffer: Any) -> int | None:
    return None if buffer is None else ctypes.addressof(buffer)
