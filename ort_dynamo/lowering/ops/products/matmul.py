"""Matmuls."""

from __future__ import annotations

import onnx_ir as ir
import torch

from ort_dynamo.graph.rounded_numbers import round_to
from ort_dynamo.lowering.context import LoweringContext, Number
from ort_dynamo.lowering.ops.memory.views import size_is_zero
from ort_dynamo.lowering.recipes.sums.accurate_sum import integer_total, total
from ort_dynamo.lowering.recipes.zeros import zeros
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.torch_internals.kernels.operators import aten
from ort_dynamo.torch_internals.sizes.symbols import is_unbacked


def transposed(value: ir.Value) -> ir.Value | None:
    """Return the value that `value` transposes in the last two dimensions, if it is such a transpose."""
    node = value.producer()
    if node is None or node.op_type != "Transpose" or node.domain:
        return None
    perm = node.attributes["perm"].as_ints()
    rank = len(perm)
    if rank < 2 or list(perm) != [*range(rank - 2), rank - 1, rank - 2]:
        return None
    return node.inputs[0]


def _fits_attribute(ctx: LoweringContext, factor: Number) -> bool:
    """Check whether `factor` can be an attribute: not symbolic, nor too fine for float32 beside float64 operands.

    Refuses the node if the result's dtype does not hold the factor.
    """
    if not isinstance(factor, (int, float)):
        return False
    ctx.check_range(factor)
    return ctx.out.dtype is not torch.float64 or factor == round_to(factor, torch.float32)


def _is(factor: Number, number: int) -> bool:
    return isinstance(factor, (int, float)) and factor == number


def product(ctx: LoweringContext, a: ir.Value, b: ir.Value, alpha: Number = 1) -> ir.Value:
    """alpha * a @ b over the last two dimensions; a transposed operand becomes an attribute, not a copy."""
    if not _fits_attribute(ctx, alpha):
        return ctx.op.Mul(product(ctx, a, b), ctx.scalar(alpha, ctx.out.dtype))
    sizes = (ctx.sizes(a)[-1], *ctx.out.shape)
    if any(size_is_zero(size) for size in sizes):
        # Defect empty_products; elsewhere as good.
        return zeros(ctx, a, ctx.out.shape)
    if ctx.target.has_defect("empty_products") and is_unbacked(*sizes):
        raise ctx.refuse("a size that depends on the data may be 0, which crashes this ONNX Runtime's kernel")
    ta, tb = transposed(a), transposed(b)
    if ctx.has_fused_matmul(a) and (alpha != 1 or ta is not None or tb is not None):
        return ctx.contrib.FusedMatMul(
            a if ta is None else ta,
            b if tb is None else tb,
            alpha=float(alpha),  # type: ignore[arg-type]
            transA=int(ta is not None),
            transB=int(tb is not None),
        )
    result: ir.Value = ctx.op.MatMul(a, b)
    return result if alpha == 1 else ctx.op.Mul(result, ctx.scalar(alpha, ctx.out.dtype))


@lowering(aten.mm.default, aten.bmm.default)
def bmm(ctx: LoweringContext, self: ir.Value, mat2: ir.Value) -> ir.Value:
    """bmm(Tensor self, Tensor mat2) -> Tensor"""
    return product(ctx, self, mat2)


@lowering(aten.addmm.default)
def addmm(
    ctx: LoweringContext, self: ir.Value, mat1: ir.Value, mat2: ir.Value, *, beta: Number = 1, alpha: Number = 1
) -> ir.Value:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    empty = any(size_is_zero(size) for size in (ctx.sizes(mat1)[-1], *ctx.out.shape))
    whole = _is(beta, 0) or empty or not ctx.out.dtype.is_floating_point
    if whole or not _fits_attribute(ctx, alpha) or not _fits_attribute(ctx, beta):
        return _plus(ctx, self, product(ctx, mat1, mat2, alpha), beta)
    ta, tb = transposed(mat1), transposed(mat2)
    return ctx.op.Gemm(
        mat1 if ta is None else ta,
        mat2 if tb is None else tb,
        self,
        alpha=float(alpha),  # type: ignore[arg-type]
        beta=float(beta),  # type: ignore[arg-type]
        transA=int(ta is not None),
        transB=int(tb is not None),
    )


@lowering(aten.baddbmm.default)
def baddbmm(
    ctx: LoweringContext, self: ir.Value, batch1: ir.Value, batch2: ir.Value, *, beta: Number = 1, alpha: Number = 1
) -> ir.Value:
    """baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _plus(ctx, self, product(ctx, batch1, batch2, alpha), beta)


@lowering(aten.addbmm.default)
def addbmm(
    ctx: LoweringContext, self: ir.Value, batch1: ir.Value, batch2: ir.Value, *, beta: Number = 1, alpha: Number = 1
) -> ir.Value:
    """addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    if any(map(size_is_zero, (*ctx.sizes(batch1), *ctx.out.shape))):
        return _plus(ctx, self, zeros(ctx, batch1, ctx.out.shape), beta)
    products = product(ctx, batch1, batch2, alpha)
    if ctx.out.dtype.is_floating_point:
        return _plus(ctx, self, ctx.op.ReduceSum(products, [0], keepdims=0), beta)
    sizes = (ctx.sizes(batch1)[0], *ctx.out.shape)
    return _plus(ctx, self, integer_total(ctx, products, sizes, [0], keepdim=False), beta)


@lowering(aten.dot.default, aten.vdot.default)
def dot(ctx: LoweringContext, self: ir.Value, tensor: ir.Value) -> ir.Value:
    """dot(Tensor self, Tensor tensor) -> Tensor"""
    if ctx.target.facts.walks_entries and ctx.out.dtype in (torch.float32, torch.float64):
        # Ten times as fast as the matmul of a row and a column, and as accurate for long ones.
        return total(ctx, ctx.op.Mul(self, tensor), ctx.sizes(self), [0], keepdim=False)
    return product(ctx, self, tensor)


@lowering(aten.mv.default)
def mv(ctx: LoweringContext, self: ir.Value, vec: ir.Value) -> ir.Value:
    """mv(Tensor self, Tensor vec) -> Tensor"""
    return _matrix_vector(ctx, self, vec)


@lowering(aten.addmv.default)
def addmv(
    ctx: LoweringContext, self: ir.Value, mat: ir.Value, vec: ir.Value, *, beta: Number = 1, alpha: Number = 1
) -> ir.Value:
    """addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    return _plus(ctx, self, _matrix_vector(ctx, mat, vec, alpha), beta)


def _matrix_vector(ctx: LoweringContext, matrix: ir.Value, vector: ir.Value, alpha: Number = 1) -> ir.Value:
    if any(map(size_is_zero, ctx.sizes(matrix))):
        return product(ctx, matrix, vector)
    # The vector as a matrix of one column: defect transposed_vector_fusion.
    return ctx.op.Squeeze(product(ctx, matrix, ctx.op.Unsqueeze(vector, [1]), alpha), [1])


def _plus(ctx: LoweringContext, bias: ir.Value, result: ir.Value, beta: Number) -> ir.Value:
    """Compute result + beta * bias; with beta 0 a nan in the bias does not spread."""
    if _is(beta, 0):
        return result
    scaled = bias if _is(beta, 1) else ctx.op.Mul(bias, ctx.scalar(beta, ctx.out.dtype))
    return ctx.op.Add(result, scaled)
