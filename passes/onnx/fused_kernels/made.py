"""The kernels that FuseKernels has made of a model, which its functions hold."""

from __future__ import annotations

import onnx_ir as ir

from ort_dynamo.passes.onnx.fused_kernels.kernel import Kernel

__all__ = ["KERNEL", "fused_kernels"]

KERNEL = "fused_kernel"
"""The key of a function's `meta` under which its kernel is stored."""


def fused_kernels(model: ir.Model) -> dict[str, Kernel]:
    """Name of a fused operator -> its kernel, of all that FuseKernels has made of a model since it was read."""
    return {function.name: function.meta[KERNEL] for function in model.functions.values() if KERNEL in function.meta}
