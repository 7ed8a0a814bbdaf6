"""Matmuls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ort_dynamo.onnx_module.registry import MICROSOFT, onnx_operator

__all__: list[str] = []


@onnx_operator("MatMul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the matmul of numpy.matmul."""
    return torch.matmul(a, b)


@onnx_operator("Gemm")
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """alpha·A·B + beta·C, with A and B transposed first if asked, and C broadcast."""
    left = torch.t(a) if transA else a
    if transB and alpha == beta == 1.0 and (c is None or c.dim() == 1):
        return F.linear(left, b, c)
    right = torch.t(b) if transB else b
    if c is None:
        found = torch.mm(left, right)
        return found if alpha == 1.0 else alpha * found
    if not a.is_floating_point():
        return (alpha * torch.mm(left, right) + beta * c).to(a.dtype)
    return torch.addmm(c, left, right, beta=beta, alpha=alpha)


@onnx_operator("Einsum")
def einsum(x: Tensor, *others: Tensor, equation: str) -> Tensor:
    """By an equation, as numpy.einsum."""
    return torch.einsum(equation.replace(" ", ""), x, *others)


def _transposed(x: Tensor, last: int, batch: int) -> Tensor:
    """Permute a factor of FusedMatMul: `batch` moves the first axis before the last, `last` swaps the last two."""
    if batch and x.dim() > 2:
        x = torch.movedim(x, 0, -2)
    return torch.transpose(x, -1, -2) if last and x.dim() > 1 else x


@onnx_operator("FusedMatMul", 1, MICROSOFT)
def fused_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:
    """alpha·A·B, each transposed first if asked."""
    found = torch.matmul(_transposed(a, transA, transBatchA), _transposed(b, transB, transBatchB))
    return found if alpha == 1.0 else alpha * found


@onnx_operator("TransposeMatMul", 1, MICROSOFT)
def transpose_matmul(
    a: Tensor,
    b: Tensor,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """Return the name that FusedMatMul had."""
    return fused_matmul(a, b, alpha=alpha, transA=transA, transB=transB)
