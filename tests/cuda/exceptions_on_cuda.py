"""The operators that run in ONNX Runtime on the CPU and in eager on CUDA, by the missing kernel.

test_operators_on_cuda.py asserts it both ways: every operator without a kernel is named here, and every named one has
none.
"""

from __future__ import annotations

from ort_dynamo.targets.target import OWN_KERNELS

__all__ = ["EXCEPTIONS", "REASONS", "exceptions"]

BOTH = ("1.19.2", "1.31.1")

REASONS = {
    "BitwiseAnd": "No kernel for integers, without fused kernels.",
    "BitwiseOr": "No kernel for integers, without fused kernels.",
    "BitwiseXor": "No kernel for integers, without fused kernels.",
    "Einsum": "Products of integers: torch has no kernel for them on CUDA either.",
    "MatMul": "Products of integers: torch has no kernel for them on CUDA either.",
}
"""ONNX operator without a kernel for some dtype, or another reason -> why no other form is used."""

EXCEPTIONS = {
    ("BitwiseAnd", "aten.bitwise_and.Tensor"): ("bitwise_and int64", BOTH),
    ("BitwiseOr", "aten.bitwise_or.Tensor"): ("bitwise_or int64", BOTH),
    ("BitwiseXor", "aten.bitwise_xor.Tensor"): ("bitwise_xor int64", BOTH),
    ("Einsum", "aten._trilinear.default"): ("nn.functional.bilinear int64", BOTH),
    ("MatMul", "aten.addbmm.default"): ("addbmm int64", BOTH),
    ("MatMul", "aten.addmm.default"): ("addmm int64", BOTH),
    ("MatMul", "aten.addmv.default"): ("addmv int64", BOTH),
    ("MatMul", "aten.baddbmm.default"): ("baddbmm int64", BOTH),
    ("MatMul", "aten.bmm.default"): ("bmm int64", BOTH),
    ("MatMul", "aten.convolution.default"): ("nn.functional.conv2d int64", BOTH),
    ("MatMul", "aten.dot.default"): ("dot int64", BOTH),
    ("MatMul", "aten.mm.default"): ("mm int64", BOTH),
    ("MatMul", "aten.mv.default"): ("mv int64", BOTH),
    ("MatMul", "aten.vdot.default"): ("vdot int64", BOTH),
}
"""(missing ONNX operator, overload) -> an operator of the database and a dtype that show it, releases without it."""


def exceptions(*, fused: bool) -> dict[tuple[str, str], tuple[str, tuple[str, ...]]]:
    """Those of a target with fused kernels, or of one without."""
    return {row: shown for row, shown in EXCEPTIONS.items() if not (fused and row[0] in OWN_KERNELS)}
