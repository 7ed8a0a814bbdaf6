"""Fused kernels of sessions on the CPU: in place of a cubin, the NumPy form of the kernel."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy_form import computed

from ort_dynamo.graph.build import BuiltGraph
from ort_dynamo.graph.fused_op import DOMAIN, FusedOp
from ort_dynamo.passes.onnx import fuse_kernels
from ort_dynamo.passes.onnx.fuse_kernels import fused_kernels
from ort_dynamo.passes.onnx.fused_kernels.kernel import Kernel, Load
from ort_dynamo.passes.onnx.fused_kernels.triton_source import fused_op
from ort_dynamo.runtime import session
from ort_dynamo.runtime.installed.importing import onnxruntime
from ort_dynamo.runtime.kernels.fused_kernel import FusedKernel, HostCode
from ort_dynamo.runtime.kernels.session_kernels import register_kernels

_Host = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int64), ctypes.c_int64)
_HELD: list[Any] = []
"""Objects whose addresses sessions hold, kept alive here."""


@contextmanager
def fused_on_the_cpu(factor: Callable[[str], float] = lambda name: 1) -> Iterator[dict[str, Kernel]]:
    """Make sessions on the CPU run fused kernels; give the kernels of compiles in this context, by name.

    Args:
        factor: gives a factor for the results of a kernel; called once for each opened kernel.
    """
    kernels: dict[str, Kernel] = {}

    def recorded(model: ir.Model) -> dict[str, Kernel]:
        kernels.update(found := fused_kernels(model))
        return found

    def host_kernels(built: BuiltGraph, *_: object) -> tuple[FusedKernel, ...]:
        return tuple(on_host(op, kernels[op.name], factor(op.name)) for op in built.kernels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuse_kernels, "fused_kernels", recorded)  # which fused_ops asks
        patch.setattr(session, "session_kernels", host_kernels)
        yield kernels


def open_with_kernels(model: onnx.ModelProto, kernels: Mapping[str, Kernel]) -> Any:
    """A session on the CPU that runs those of the kernels that a model calls."""
    settings = onnxruntime().SessionOptions()
    called = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    ops = [fused_op(kernels[name], name) for name in sorted(called)]
    register_kernels(settings, [on_host(op, kernels[op.name]) for op in ops])
    return onnxruntime().InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def on_host(op: FusedOp, kernel: Kernel, factor: float = 1) -> FusedKernel:
    """An operator that the NumPy form of a kernel computes, times a factor."""

    def host(pointers: Any, symbols: Any, programs: int) -> int:
        given = [symbols[index] for index in range(len(op.symbols))]
        assert programs == op.programs(given)
        extents = [_extent(kernel, index, given) for index in range(len(kernel.inputs))]
        inputs = [
            _array(pointers[index], dtype, extent)
            for index, (dtype, extent) in enumerate(zip(kernel.inputs, extents, strict=True))
        ]
        outputs = computed(kernel, inputs, given)
        for place, (dtype, output) in enumerate(zip(kernel.outputs, outputs, strict=True), len(inputs)):
            _array(pointers[place], dtype, output.size)[:] = output if factor == 1 else output * factor
        return 0

    callback = _Host(_guarded(host))
    _HELD.append(callback)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    return FusedKernel(op, HostCode(address), None)


def _guarded(host: Callable[..., int]) -> Callable[..., int]:
    def run(*given: Any) -> int:
        try:
            return host(*given)
        except BaseException:  # becomes an error of the session, since none goes through ONNX Runtime
            traceback.print_exc()
            return 1

    return run


def _extent(kernel: Kernel, index: int, symbols: Sequence[int]) -> int:
    """Count the elements of an input, from the first to the last that a kernel may read."""
    counts = [size.value(symbols) for size in kernel.loops]

    def end(load: Load) -> int:
        only = dict(load.only)
        last = (only.get(loop, count - 1) for loop, count in enumerate(counts))
        steps = (number * stride.value(symbols) for number, stride in zip(last, load.strides, strict=True))
        picked = ((count.value(symbols) - 1) * stride.value(symbols) for _, stride, count in load.places)
        return load.offset.value(symbols) + sum(steps) + sum(picked) + 1

    return max((end(step) for step in kernel.steps if isinstance(step, Load) and step.input == index), default=0)


def _array(pointer: int | None, dtype: ir.DataType, count: int) -> np.ndarray[Any, Any]:
    kind = dtype.numpy()
    if not count:
        return np.empty(0, kind)
    assert pointer is not None
    return np.ctypeslib.as_array((ctypes.c_uint8 * (count * kind.itemsize)).from_address(pointer)).view(kind)
