"""The target of a compile, as a value: passes and lowerings ask it, never the installed runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from ort_dynamo.targets.profiles import CPU, CUDA, CUDA_FUSED, Profile

if TYPE_CHECKING:
    from ort_dynamo.targets.prices import Prices

__all__ = ["OPSET", "OWN_KERNELS", "TRAINING_PACKAGE", "KernelTable", "Target"]

OPSET = 20
"""The ai.onnx opset of every model: the newest that both tested runtimes have kernels for and torch_lib can meet."""

TRAINING_PACKAGE = "onnxruntime-training"
"""The build with gradient kernels."""

OWN_KERNELS: Mapping[str, frozenset[ir.DataType]] = dict.fromkeys(
    ("BitwiseAnd", "BitwiseOr", "BitwiseXor"), frozenset({ir.DataType.INT32, ir.DataType.INT64})
)
"""ONNX operator without a kernel in CUDA's provider -> types for which one node of it becomes a fused kernel.

If the fused kernel cannot be compiled, ONNX Runtime runs the node on the CPU, between copies.
"""

KernelTable = Mapping[tuple[str, str], tuple[Mapping[str, frozenset[ir.DataType]], ...]]
"""(domain, op type) -> one entry per kernel: type variable -> dtypes it takes."""


@dataclass(frozen=True)
class Target:
    """One execution provider of one runtime.

    Attributes:
        package: the distribution name, such as "onnxruntime-training".
        version: the version of the distribution.
        provider: "CPUExecutionProvider" or "CUDAExecutionProvider".
        device_type: the torch device type of its tensors, "cpu" or "cuda". Other code uses the
            facts of the profile, and does not compare it.
        contrib_ops: whether operators outside ONNX (com.microsoft) may be used where they have kernels.
        stands_alone: whether a model is a file that runs without torch: it has its own random operators, and no nodes
            that only raise torch's errors.
        fuses_kernels: whether groups of nodes become fused kernels, which the session launches.
        gradient_kernels: whether the training build's gradient operators (com.microsoft) have kernels.
        kernels: the dtypes of each operator's kernels. They follow from the first three attributes, so they are not in
            the repr, which is part of graph keys.
        defects: the names of its known defects (`runtime/installed/defects.py`), which follow from them, too.
    """

    package: str
    version: str
    provider: str
    device_type: str
    gradient_kernels: bool
    kernels: KernelTable = field(repr=False, compare=False)
    defects: frozenset[str] = field(repr=False, compare=False)
    contrib_ops: bool = True
    stands_alone: bool = False
    fuses_kernels: bool = False

    def has_defect(self, name: str) -> bool:
        """Check whether the target has the defect of this row of `runtime/installed/defects.py`."""
        return name in self.defects

    def has_op(self, op_type: str, domain: str = "") -> bool:
        """Check whether any kernel of this operator exists."""
        return (self.contrib_ops or not domain) and (domain, op_type) in self.kernels

    def takes(self, op_type: str, domain: str, types: Mapping[str, ir.DataType]) -> bool:
        """Check whether one kernel of the operator takes all of these type-variable bindings.

        Variables that a kernel does not constrain are free. An operator without any kernel takes nothing.
        """
        asked = (op_type, domain, *types.items())
        if asked not in self._answers:
            self._answers[asked] = (self.contrib_ops or not domain) and any(
                all(dtype in kernel[variable] for variable, dtype in types.items() if variable in kernel)
                for kernel in self.kernels.get((domain, op_type), ())
            )
        return self._answers[asked]

    def makes_kernel(self, op_type: str, domain: str, types: Mapping[str, ir.DataType]) -> bool:
        """Check whether each node of an operator becomes a fused kernel, if need be alone, and needs no other kernel.

        Its inputs and outputs then need sizes that a fused kernel takes: `fuse_kernels.lacks_kernel` tells.
        """
        return self.fuses_kernels and not domain and types.get("T") in OWN_KERNELS.get(op_type, ())

    @cached_property
    def _answers(self) -> dict[tuple[Any, ...], bool]:
        """Those of `takes`: a model asks the same few questions thousands of times."""
        return {}

    @cached_property
    def facts(self) -> Profile:
        """The profile of its provider."""
        if self.device_type == "cpu":
            profile = CPU
        else:
            profile = CUDA_FUSED if self.fuses_kernels else CUDA
        return profile.in_file() if self.stands_alone else profile

    @property
    def prices(self) -> Prices:
        """The prices for running nodes in torch by choice. They follow from the other fields and enter no key."""
        # Here, for passes on ONNX models run without torch.
        from ort_dynamo.targets import prices

        if self.device_type == "cuda":
            return prices.CUDA_FUSED if self.fuses_kernels else prices.CUDA
        return prices.CPU_TRAINING if self.is_training_build else prices.CPU

    @property
    def is_training_build(self) -> bool:
        """True if its kernels are those of onnxruntime-training 1.19.2, older than those of all other builds."""
        return self.package == TRAINING_PACKAGE
