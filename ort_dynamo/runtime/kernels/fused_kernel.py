"""A fused operator together with the code that computes it: cubins for CUDA, or machine code of the host."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ort_dynamo.graph.fused_op import ITSELF, FusedOp

__all__ = [
    "DRIVER",
    "MAX_RANK",
    "TRAILING_NULLS",
    "CompiledKernel",
    "FusedKernel",
    "HostCode",
    "KernelVariant",
    "Unavailable",
]

DRIVER = "libcuda.so.1"
"""The library of CUDA's driver."""

MAX_RANK = 32
"""Dimensions of a tensor at most, as fused.c has it."""

TRAILING_NULLS = 4
"""Null pointers after the arguments, for Triton's one or two scratch buffers, which nothing reads."""


_INT64 = 7
"""int64, by ONNX's number."""


@dataclass(frozen=True)
class KernelVariant:
    """A cubin, and how it is launched: ceil(count / per_program) blocks of 32 × num_warps threads.

    Attributes:
        cubin: the code, for one architecture.
        entry: the name of the kernel in it.
        num_warps: the warps per block.
        shared: the bytes of dynamic shared memory per block.
        parameters: the number of parameters. Those after the operator's are null pointers, at most `TRAILING_NULLS`.
    """

    cubin: bytes = dataclasses.field(repr=False)
    entry: str
    num_warps: int
    shared: int
    parameters: int


@dataclass(frozen=True)
class CompiledKernel:
    """One fused kernel for one architecture.

    Attributes:
        aligned: the variant for pointers that are all multiples of 16.
        unaligned: the variant for other pointers.
    """

    aligned: KernelVariant
    unaligned: KernelVariant


@dataclass(frozen=True)
class HostCode:
    """Machine code for the host.

    Attributes:
        address: the address of `int (*)(void **pointers, const int64_t *symbols, int64_t programs)`. The pointers are
            those of the inputs, then of the outputs. A nonzero result is an error.
    """

    address: int


@dataclass(frozen=True)
class FusedKernel:
    """A fused operator, its code, and the provider that runs it.

    Attributes:
        op: the operator.
        code: the code of the operator.
        provider: the provider of ONNX Runtime; None is the CPU's.

    Raises (in the constructor):
        ValueError: the operator refers to an input, axis or symbol that it does not have.
    """

    op: FusedOp
    code: CompiledKernel | HostCode
    provider: str | None

    def __post_init__(self) -> None:
        op = self.op
        shapes = [output.shape for output in op.outputs]
        sizes = [op.count, *(size for shape in shapes for size in shape)]
        if not op.outputs or op.per_program < 1 or any(len(shape) > MAX_RANK for shape in shapes):
            raise ValueError(f"{op.name}: outputs, per_program or a rank is out of range")
        if not all(0 <= index < len(op.inputs) and ITSELF <= axis < MAX_RANK for index, axis in op.symbols):
            raise ValueError(f"{op.name}: a symbol is the size of an input that there is not")
        numbers = [index for index, axis in op.symbols if axis == ITSELF]
        if len(set(numbers)) < len(numbers) or any(op.inputs[index] != _INT64 for index in numbers):
            raise ValueError(f"{op.name}: a number on the host is no int64, or is there twice")
        if not all(0 <= symbol < len(op.symbols) for size in sizes for symbol in size.symbols):
            raise ValueError(f"{op.name}: a size has a symbol that there is not")


@dataclass(frozen=True)
class Unavailable:
    """Fused kernels, or one way to register them, cannot be had.

    Attributes:
        reason: a sentence without its full stop.
    """

    reason: str
