"""Models with fused operators, and the kernels that compute these on the CPU."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir

from ort_dynamo.graph.fused_op import FusedOp, FusedOutput, Size
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.kernels.fused_kernel import FusedKernel, HostCode
from ort_dynamo.runtime.kernels.kernel_callbacks import KernelCallbacks
from ort_dynamo.runtime.kernels.kernel_library import KernelLibrary

FLOAT = 1
N = Size(1, (0,))
Registration = KernelLibrary | KernelCallbacks


def rows_op(name: str, width: int = 4, per_program: int = 16) -> FusedOp:
    """An operator from float[n, width] to float[n, width]."""
    shape = (N, Size(width))
    return FusedOp(name, (FLOAT,), (FusedOutput(FLOAT, shape),), ((0, 0),), N * Size(width), per_program, "")


def rows_kernel(name: str, function: Callable[..., Any], width: int = 4) -> FusedKernel:
    """The operator `rows_op`, computed by a function of one array."""
    return _rows_kernel(name, function, width)


@functools.cache  # so that equal ones are equal
def _rows_kernel(name: str, function: Callable[..., Any], width: int) -> FusedKernel:
    return host_kernel(rows_op(name, width), function, ((N, Size(width)),))


_HOST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)
_CALLBACKS: list[Any] = []  # for good: kernels have their addresses


def host_code(callback: Callable[[Any, Any, int], int]) -> HostCode:
    """The code that calls `callback(pointers, symbols, programs)`."""
    _CALLBACKS.append(_HOST(callback))
    return HostCode(ctypes.cast(_CALLBACKS[-1], ctypes.c_void_p).value or 0)


def host_kernel(op: FusedOp, function: Callable[..., Any], shapes: Sequence[tuple[Size, ...]]) -> FusedKernel:
    """An operator that a function of NumPy arrays computes.

    Args:
        op: the operator.
        function: takes the inputs, which are read-only, and returns the output, or a sequence of several. Where it
            raises, the code gives error 1.
        shapes: dimensions of each input.
    """

    def host(pointers: Any, symbols: Any, programs: int) -> int:
        try:
            inputs = [
                _array(pointers[place], dtype, shape, symbols, writes=False)
                for place, (dtype, shape) in enumerate(zip(op.inputs, shapes, strict=True))
            ]
            results = function(*inputs)
            results = results if isinstance(results, (tuple, list)) else (results,)
            for place, (output, result) in enumerate(zip(op.outputs, map(np.asarray, results), strict=True)):
                target = _array(pointers[len(op.inputs) + place], output.dtype, output.shape, symbols, writes=True)
                assert (result.shape, result.dtype) == (target.shape, target.dtype)
                target[...] = result
            return 0
        except BaseException:  # no exception goes through ONNX Runtime
            return 1

    return FusedKernel(op, host_code(host), None)


def _array(pointer: int | None, dtype: int, shape: Sequence[Size], symbols: Sequence[int], writes: bool) -> Any:
    """The tensor at an address, as an array that does not own it; bfloat16 is that of ml_dtypes."""
    sizes = tuple(size.value(symbols) for size in shape)
    numpy_dtype = ir.DataType(dtype).numpy()
    nbytes = math.prod(sizes) * numpy_dtype.itemsize
    if not nbytes:
        return np.empty(sizes, numpy_dtype)
    assert pointer is not None
    memory = (ctypes.c_uint8 * nbytes).from_address(pointer)
    array = np.ctypeslib.as_array(memory).view(numpy_dtype).reshape(sizes)
    array.flags.writeable = writes
    return array


def model(graph: str, functions: str = "") -> bytes:
    """A serialised model of a graph `(…) => (…) { … }` in ONNX's text, with `fused.` before fused operators."""
    header = '<ir_version: 10, opset_import: ["" : 20, "ort_dynamo.fused" : 1]>'
    text = f"{header}\ng {graph}\n{functions}".replace("fused.", "ort_dynamo.fused.")
    return onnx.parser.parse_model(text).SerializeToString()


def body(name: str, nodes: str) -> str:
    """The function from `x` to `y` that stands for a fused operator."""
    return f'<domain: "ort_dynamo.fused", opset_import: ["" : 20]> {name} (x) => (y) {{ {nodes} }}\n'


def open_model(data: bytes, registration: Registration | None, kernels: Sequence[FusedKernel]) -> Any:
    """A session on the CPU; None registers nothing."""
    settings = onnxruntime().SessionOptions()
    settings.log_severity_level = 4  # errors become exceptions, which is enough
    if registration is not None:
        registration.register(settings, kernels)
    return onnxruntime().InferenceSession(data, settings, providers=["CPUExecutionProvider"])


def rows(count: int, width: int = 4) -> np.ndarray[Any, Any]:
    return np.arange(count * width, dtype=np.float32).reshape(count, width)
