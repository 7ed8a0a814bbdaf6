"""Determinants; factorisations and functions of matrices, which torch computes with LAPACK, are refused here.

Unrolled into ONNX operators (LU with pivots, Cholesky, substitution; onnxruntime 1.31.1, float32, one thread),
nearly all took longer than a node in eager with all that it costs between two sessions: an inverse of 3 by 3 took 67 µs
instead of 41, of 4096 such 9.4 ms instead of 0.6, of 4096 of 8 by 8 74 ms instead of 3; a triangular system of 4096 of
8 by 8 3.7 ms instead of 1.7.
"""

from __future__ import annotations

import onnx_ir as ir

from ort_dynamo.lowering.context import LoweringContext
from ort_dynamo.lowering.ops.memory.views import size_is_zero
from ort_dynamo.lowering.registry import keep_in_eager, lowering
from ort_dynamo.torch_internals.kernels.operators import aten


@lowering(aten._linalg_det.default)
def det(ctx: LoweringContext, self: ir.Value) -> tuple[ir.Value | None, ...]:
    """_linalg_det(Tensor A) -> (Tensor result, Tensor LU, Tensor pivots)"""
    if ctx.used - {0}:
        raise ctx.refuse("the gradient of a determinant needs the LU factorisation, which ONNX does not have")
    sizes = ctx.sizes(self)
    if any(map(size_is_zero, sizes)):
        fake = ctx.out[0]
        return ctx.op.Expand(ctx.constant(1, fake.dtype), ctx.shape(fake.shape)), None, None
    return ctx.op.Det(self), None, None


keep_in_eager(
    "a factorisation or function of a matrix, for which ONNX has no operator",
    aten._linalg_eigh.default,
    aten._linalg_eigvals.default,
    aten._linalg_slogdet.default,
    aten._linalg_solve_ex.default,
    aten._linalg_svd.default,
    aten.cholesky.default,
    aten.geqrf.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_eig.default,
    aten.linalg_householder_product.default,
    aten.linalg_inv_ex.default,
    aten.linalg_ldl_factor_ex.default,
    aten.linalg_ldl_solve.default,
    aten.linalg_lstsq.default,
    aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_lu_solve.default,
    aten.linalg_matrix_exp.default,
    aten.linalg_pinv.atol_rtol_tensor,
    aten.linalg_qr.default,
    aten.lu_unpack.default,
    aten.ormqr.default,
)
