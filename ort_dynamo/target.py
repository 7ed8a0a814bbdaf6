"""What a graph is compiled for, as a value: passes and lowerings ask it, never the installed runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

__all__ = ["FOR_KERNEL", "FX_NODE", "OPSET", "READS_ROUNDED", "ZERO_DIVISOR", "KernelTable", "Target", "release"]

OPSET = 20
"""The ai.onnx opset of every model: the newest that both tested runtimes have kernels for and torch_lib can meet."""

FX_NODE = "ort_dynamo.fx_node"
"""Metadata of an ONNX node: the FX node whose lowering made it."""

FOR_KERNEL = "ort_dynamo.for_kernel"
"""Metadata of a Cast: it only is there because an operator has no kernel for the dtype of its inputs."""

READS_ROUNDED = "ort_dynamo.reads_rounded"
"""Metadata of a node: what it reads must be rounded to torch's dtype, though it is computed in a wider one."""

ZERO_DIVISOR = "zero_divisor"
"""How the name of a node begins that fails where an integer is divided by zero."""

KernelTable = Mapping[tuple[str, str], tuple[Mapping[str, frozenset[ir.DataType]], ...]]
"""(domain, op type) -> one entry per kernel: type variable -> dtypes it takes."""


def release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version, which versions are compared by."""
    return tuple(int(part) for part in version.split(".")[:2])


@dataclass(frozen=True)
class Target:
    """One execution provider of one runtime.

    Attributes:
        package: distribution name, e.g. "onnxruntime-training".
        version: its version.
        provider: "CPUExecutionProvider" or "CUDAExecutionProvider".
        device_type: the torch device type of its tensors, "cpu" or "cuda".
        gradient_kernels: whether the training build's gradient operators (com.microsoft) have kernels.
        kernels: which dtypes each operator's kernels take. Derived from the first three, so outside the repr
            that enters graph keys.
    """

    package: str
    version: str
    provider: str
    device_type: str
    gradient_kernels: bool
    kernels: KernelTable = field(repr=False, compare=False)

    def has_op(self, op_type: str, domain: str = "") -> bool:
        """Whether any kernel of this operator exists."""
        return (domain, op_type) in self.kernels

    def takes(self, op_type: str, domain: str, types: Mapping[str, ir.DataType]) -> bool:
        """Whether one kernel of the operator takes all of these type-variable bindings.

        Variables that a kernel does not constrain are free. An operator without any kernel takes nothing.
        """
        return any(
            all(dtype in kernel[variable] for variable, dtype in types.items() if variable in kernel)
            for kernel in self.kernels.get((domain, op_type), ())
        )
