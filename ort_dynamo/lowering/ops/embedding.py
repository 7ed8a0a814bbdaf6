"""Table look-up with its gradient."""

from __future__ import annotations

import onnx_ir as ir
import torch

from ort_dynamo.lowering.add_rows import add_rows
from ort_dynamo.lowering.context import LoweringContext, Size
from ort_dynamo.lowering.promotion import float_dtype
from ort_dynamo.lowering.registry import lowering
from ort_dynamo.lowering.zeros import zeros

aten = torch.ops.aten


@lowering(aten.embedding.default)
def embedding(
    ctx: LoweringContext,
    weight: ir.Value,
    indices: ir.Value,
    padding_idx: Size = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ir.Value:
    """embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False) -> Tensor"""  # noqa: E501
    return ctx.op.Gather(weight, indices, axis=0)


@lowering(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    ctx: LoweringContext,
    grad_output: ir.Value,
    indices: ir.Value,
    num_weights: Size,
    padding_idx: Size,
    scale_grad_by_freq: bool,
) -> ir.Value:
    """embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt padding_idx, bool scale_grad_by_freq) -> Tensor"""  # noqa: E501
    op = ctx.op
    dtype = float_dtype(ctx.out.dtype)
    width = ctx.sizes(grad_output)[-1]
    rows = ctx.reshape(ctx.cast(indices, torch.int64), [ctx.fake(indices).numel(), 1])
    grad = ctx.reshape(ctx.cast(grad_output, dtype), [ctx.fake(indices).numel(), width])
    if scale_grad_by_freq:
        ones = op.Expand(ctx.constant(1, dtype), op.Shape(rows))
        count = op.ScatterElements(zeros(ctx, grad, [num_weights, 1]), rows, ones, axis=0, reduction="add")
        grad = op.Div(grad, op.Gather(count, op.Squeeze(rows, [1]), axis=0))
    table = zeros(ctx, grad, [num_weights * width])
    result = ctx.reshape(add_rows(ctx, table, rows, grad, width), [num_weights, width])
    if not isinstance(padding_idx, int) or padding_idx >= 0:
        # Clearing one row of the result is less work than clearing its share of the gradients.
        row = op.Reshape(ctx.shape([padding_idx]), [1, 1])
        result = op.ScatterND(result, row, op.Expand(ctx.constant(0, dtype), ctx.shape([1, width])))
    return ctx.cast(result, ctx.out.dtype)
