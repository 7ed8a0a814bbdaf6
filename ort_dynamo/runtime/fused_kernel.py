"""A fused operator together with the code that computes it: cubins for CUDA, or a function for the CPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_dynamo.fused_op import FusedOp, Size

__all__ = [
    "DRIVER",
    "MAX_RANK",
    "TRAILING_NULLS",
    "Cubin",
    "Cubins",
    "FusedKernel",
    "HostCode",
    "HostFunction",
    "Unavailable",
    "message_of",
    "run_on_host",
]

DRIVER = "libcuda.so.1"
"""The library of CUDA's driver."""

MAX_RANK = 32
"""Dimensions of a tensor at most, as fused.c has it."""

TRAILING_NULLS = 4
"""Null pointers behind the arguments, for Triton's scratch buffers: releases have one or two, which nothing reads."""


@dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel.

    Attributes:
        image: the file.
        entry: the kernel's name in it.
        num_warps: of each program.
        shared: bytes of dynamic shared memory of each program.
    """

    image: bytes = field(repr=False)
    entry: str
    num_warps: int
    shared: int


@dataclass(frozen=True)
class Cubins:
    """A kernel in up to two variants.

    Attributes:
        aligned: its pointers are multiples of 16; None where there is no such variant.
        unaligned: its pointers are any; None where there is no such variant.
    """

    aligned: Cubin | None
    unaligned: Cubin | None


@dataclass(frozen=True)
class HostCode:
    """Machine code of the host.

    Attributes:
        address: of `int (*)(void **pointers, const int64_t *symbols, int64_t programs)`. The pointers are those of
            the inputs, then of the outputs. A result other than 0 is an error.
    """

    address: int


@dataclass(frozen=True)
class HostFunction:
    """A Python function on NumPy arrays.

    Attributes:
        function: takes the inputs, which are read-only, and returns the output, or a sequence of several. An
            exception of it becomes one of the session's run.
        shapes: dimensions of each input.
    """

    function: Callable[..., Any]
    shapes: tuple[tuple[Size, ...], ...]


@dataclass(frozen=True)
class FusedKernel:
    """A fused operator, its code, and the provider that runs it.

    Attributes:
        op: the operator.
        code: computes it.
        provider: of ONNX Runtime; None is the CPU's.

    Raises, where it is made:
        ValueError: the operator refers to an input, axis or symbol that it does not have, or the code does not fit.
    """

    op: FusedOp
    code: Cubins | HostCode | HostFunction
    provider: str | None

    def __post_init__(self) -> None:
        op, code = self.op, self.code
        shapes = [output.shape for output in op.outputs] + (list(code.shapes) if isinstance(code, HostFunction) else [])
        sizes = [op.count, *(size for shape in shapes for size in shape)]
        if not op.outputs or op.per_program < 1 or any(len(shape) > MAX_RANK for shape in shapes):
            raise ValueError(f"{op.name}: outputs, per_program or a rank is out of range")
        if not all(0 <= index < len(op.inputs) and 0 <= axis < MAX_RANK for index, axis in op.symbols):
            raise ValueError(f"{op.name}: a symbol is the size of an input that there is not")
        if not all(0 <= symbol < len(op.symbols) for size in sizes for symbol in size.symbols):
            raise ValueError(f"{op.name}: a size has a symbol that there is not")
        if isinstance(code, Cubins) and code.aligned is None and code.unaligned is None:
            raise ValueError(f"{op.name}: there is no variant")
        if isinstance(code, HostFunction) and len(code.shapes) != len(op.inputs):
            raise ValueError(f"{op.name}: {len(code.shapes)} shapes for {len(op.inputs)} inputs")


@dataclass(frozen=True)
class Unavailable:
    """Fused kernels, or one way to register them, cannot be had.

    Attributes:
        reason: a sentence without its full stop.
    """

    reason: str


def run_on_host(op: FusedOp, code: HostFunction, pointers: Sequence[int | None], symbols: Sequence[int]) -> None:
    """Call a function on the tensors at these addresses.

    Args:
        op: the operator.
        code: its function.
        pointers: addresses of the inputs, then of the outputs.
        symbols: values of the operator's symbols.

    Raises:
        ValueError: a result has another shape or dtype than the operator says.
        Exception: whatever the function raises.
    """
    inputs = [
        _array(pointer, dtype, shape, symbols, writes=False)
        for pointer, dtype, shape in zip(pointers, op.inputs, code.shapes, strict=False)
    ]
    results = code.function(*inputs)
    results = results if isinstance(results, tuple | list) else (results,)
    for place, (pointer, output, result) in enumerate(
        zip(pointers[len(op.inputs) :], op.outputs, map(np.asarray, results), strict=True)
    ):
        target = _array(pointer, output.dtype, output.shape, symbols, writes=True)
        if (result.shape, result.dtype) != (target.shape, target.dtype):
            raise ValueError(
                f"output {place} is {result.dtype}{list(result.shape)}, expected {target.dtype}{list(target.shape)}"
            )
        target[...] = result


def message_of(error: BaseException) -> bytes:
    """The text of an exception for a status, as ASCII, since it may be cut anywhere."""
    return f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace")


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
